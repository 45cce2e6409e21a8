import pytest

from vllm_moe_modular.errors import SettingsError
from vllm_moe_modular.settings import VARIABLES, Settings, from_environment, with_overrides


def test_nothing_set_is_the_documented_default() -> None:
    assert from_environment({"PATH": "/bin"}) == Settings()


def test_every_variable_reaches_its_field() -> None:
    settings = from_environment(
        {
            "VLLM_MOE_MODULAR": "1",
            "VLLM_MOE_MODULAR_ALL2ALL": "torch",
            "VLLM_MOE_MODULAR_EXPERTS": "torch",
            "VLLM_MOE_MODULAR_STRICT": "true",
            "VLLM_MOE_MODULAR_LOW_LATENCY_TOKENS": "1024",
            "VLLM_MOE_MODULAR_TIMEOUT_S": "2.5",
            "VLLM_MOE_MODULAR_TRACE": "traces",
            "VLLM_MOE_MODULAR_TRACE_EVERY": "8",
            "VLLM_MOE_MODULAR_SKIP_LAYERS": "*.layers.0.*, *.mtp.*",
            "VLLM_MOE_MODULAR_TUNED": "tables",
        }
    )
    assert settings == Settings(
        enabled=True,
        all2all="torch",
        experts="torch",
        strict=True,
        low_latency_tokens=1024,
        timeout_s=2.5,
        trace="traces",
        trace_every=8,
        skip_layers=("*.layers.0.*", "*.mtp.*"),
        tuned="tables",
    )


@pytest.mark.parametrize("name", ["VLLM_MOE_MODULAR_ALLTOALL", "VLLM_MOE_MODULARALL2ALL"])
def test_a_misspelt_variable_names_the_close_one_and_lists_all(name: str) -> None:
    with pytest.raises(SettingsError) as error:
        from_environment({name: "torch"})
    assert "did you mean VLLM_MOE_MODULAR_ALL2ALL?" in str(error.value)
    assert all(v.name in str(error.value) for v in VARIABLES)


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("VLLM_MOE_MODULAR", "yes", "0 or 1"),
        ("VLLM_MOE_MODULAR_STRICT", "2", "0 or 1"),
        ("VLLM_MOE_MODULAR_LOW_LATENCY_TOKENS", "1025", "from 1 to 1024"),
        ("VLLM_MOE_MODULAR_LOW_LATENCY_TOKENS", "0", "from 1 to 1024"),
        ("VLLM_MOE_MODULAR_TIMEOUT_S", "0", "from 0.001 to 604800"),
        ("VLLM_MOE_MODULAR_TIMEOUT_S", "1e10", "from 0.001 to 604800"),
        ("VLLM_MOE_MODULAR_TIMEOUT_S", "1" + 400 * "0", "from 0.001 to 604800"),
        ("VLLM_MOE_MODULAR_LOW_LATENCY_TOKENS", 5000 * "1", "from 1 to 1024"),
        ("VLLM_MOE_MODULAR_TIMEOUT_S", "nan", "from 0.001"),
        ("VLLM_MOE_MODULAR_TRACE_EVERY", "0", "1 or more"),
        ("VLLM_MOE_MODULAR_ALL2ALL", "", "name of a part"),
        ("VLLM_MOE_MODULAR_TUNED", " ", "not blanks alone"),
    ],
)
def test_a_bad_value_says_what_the_variable_takes(name: str, value: str, takes: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}={value!r}.*{takes}"):
        from_environment({name: value})


def test_additional_config_wins_over_the_environment() -> None:
    settings = from_environment({"VLLM_MOE_MODULAR_ALL2ALL": "torch"})
    assert with_overrides(settings, {"all2all": "allgather", "skip_layers": ["a", "b,c"]}) == Settings(
        all2all="allgather", skip_layers=("a", "b", "c")
    )


@pytest.mark.parametrize(
    "config", [{"al2all": "torch"}, {"strict": "maybe"}, ["all2all"], {"timeout_s": True}, {"timeout_s": 10**400}]
)
def test_a_bad_additional_config_is_an_error(config: object) -> None:
    with pytest.raises(SettingsError, match="additional-config"):
        with_overrides(Settings(), config)  # type: ignore[arg-type]


def test_digest_follows_what_ranks_must_share() -> None:
    assert Settings(trace="a").digest == Settings(trace="b").digest
    assert Settings(all2all="torch").digest != Settings(all2all="allgather").digest
