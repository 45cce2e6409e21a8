"""The one place the version stands; pyproject.toml reads it from here."""

__version__ = "0.1.0"
