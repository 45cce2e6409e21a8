"""What our tests share with the tests of third-party parts. Importing this imports neither torch nor vllm."""
