"""Options: precedence, checks, what enters keys, and the table of all of them."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch._inductor import list_mode_options

from dynafuse import config
from dynafuse.config import MODES, OPTIONS, Config, Option, resolve
from dynafuse.errors import OptionError


@pytest.fixture(autouse=True)
def _cost_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_cost_constants", {})
    config.register_cost_constants({"launch_us": "made up", "bandwidth": "made up as well"})


def of(
    mode: str | None = None, options: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> Config:
    """Resolve in an empty environment unless one is given."""
    return resolve(mode, options, environ or {})


def test_config_has_one_attribute_per_declared_option() -> None:
    assert [field.name for field in dataclasses.fields(Config)] == [option.name for option in OPTIONS]


def test_environment_names_follow_option_names() -> None:
    for option in OPTIONS:
        suffix = "_<NAME>" if option.name == "cost" else ""
        assert option.env == f"DYNAFUSE_{option.name.upper()}{suffix}"


def test_defaults() -> None:
    assert of() == Config(
        strict=False,
        device=None,
        executors=None,
        round_like_eager=False,
        fallback_random=False,
        check_indices=True,
        workers=None,
        repro_dir=None,
        trace=None,
        recompute=True,
        rematerialize="min_cut",
        pad_products=True,
        join_products=True,
        join_attention=True,
        reuse_buffers=True,
        max_region_ops=200,
        reuse_layers="auto",
        cudagraphs=False,
        capture="auto",
        force={},
        tune="unsure",
        tune_budget_s=20.0,
        near_match=True,
        size_classes=False,
        specialize_after=3,
        interim_plan=False,
        cache=True,
        cache_size_mb=1024,
        cost={},
    )


def test_the_process_environment_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAFUSE_WORKERS", "3")
    assert resolve().workers == 3
    monkeypatch.setenv("DYNAFUSE_WORKERS", "4")
    assert resolve().workers == 4


def test_precedence_is_options_environment_mode_default() -> None:
    environ = {"DYNAFUSE_CUDAGRAPHS": "0"}
    assert of("reduce-overhead").cudagraphs is True
    assert of("reduce-overhead", None, environ).cudagraphs is False
    assert of("reduce-overhead", {"cudagraphs": True}, environ).cudagraphs is True
    assert of("default") == of(None) == of(None, {})


def test_modes_are_those_of_torch() -> None:
    assert set(MODES) == {"default", *list_mode_options()} - {"lite"}  # which leaves nearly all to eager
    assert [(of(mode).tune, of(mode).cudagraphs) for mode in ("max-autotune", "max-autotune-no-cudagraphs")] == [
        ("always", True), ("always", False)]
    assert of("max-autotune", {"tune": "never"}).tune == "never"


@pytest.mark.parametrize("mode", ["max_autotune", "Default", "", 3, ["default"]])
def test_unknown_mode_lists_the_modes(mode: object) -> None:
    with pytest.raises(OptionError, match=r"unknown mode .*valid: default, max-autotune, max-autotune-no-cudagraphs, reduce-overhead"):
        of(mode)  # type: ignore[arg-type]


def test_unknown_option_lists_all_and_suggests() -> None:
    with pytest.raises(OptionError, match=r"'stritc' \(did you mean 'strict'\?\)") as caught:
        of(None, {"stritc": True})
    assert all(option.name in str(caught.value) for option in OPTIONS)


def test_options_must_be_a_mapping() -> None:
    with pytest.raises(OptionError, match="expected a dict"):
        of(None, ["strict"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strict", 1),
        ("strict", "yes"),
        ("strict", None),
        ("device", ""),
        ("device", 90),
        ("executors", ["cuda"]),
        ("executors", "triton,cuda"),
        ("executors", [1]),
        ("executors", 5),
        ("workers", -1),
        ("workers", True),
        ("workers", "2"),
        ("workers", 1.5),
        ("repro_dir", ""),
        ("repro_dir", 7),
        ("max_region_ops", 0),
        ("max_region_ops", None),
        ("force", None),
        ("force", ["head"]),
        ("tune", "sometimes"),
        ("tune", True),
        ("tune", None),
        ("tune_budget_s", -1),
        ("tune_budget_s", float("inf")),
        ("tune_budget_s", "20"),
        ("cost", None),
        ("cost", 1.0),
        ("cost", {"launch_us": "5"}),
        ("cost", {"launch_us": -1}),
        ("cost", {"launch_us": float("nan")}),
        ("cost", {"launch_us": True}),
        ("cost", {"launch_us": 10**400}),
    ],
)
def test_ill_typed_option_names_itself_and_what_it_takes(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=rf"option '{name}' is .*expected"):
        of(None, {name: value})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DYNAFUSE_STRICT", "maybe"),
        ("DYNAFUSE_WORKERS", "many"),
        ("DYNAFUSE_WORKERS", "-1"),
        ("DYNAFUSE_EXECUTORS", "triton,cuda"),
        ("DYNAFUSE_DEVICE", " "),
        ("DYNAFUSE_MAX_REGION_OPS", "0"),
        ("DYNAFUSE_TUNE", "sometimes"),
        ("DYNAFUSE_TUNE_BUDGET_S", "long"),
        ("DYNAFUSE_TUNE_BUDGET_S", "-1"),
        ("DYNAFUSE_COST_LAUNCH_US", "fast"),
        ("DYNAFUSE_COST_LAUNCH_US", "inf"),
        ("DYNAFUSE_COST_LAUNCH_US", "-2"),
    ],
)
def test_ill_typed_variable_names_itself_and_what_it_takes(name: str, text: str) -> None:
    with pytest.raises(OptionError, match=rf"environment variable {name} is '{text}' \(str\): expected"):
        of(environ={name: text})


def test_choices_are_listed() -> None:
    with pytest.raises(OptionError, match="out of triton, nvfuser, inductor, eager"):
        of(None, {"executors": ["cuda"]})


def test_unknown_variable_lists_all_and_suggests() -> None:
    with pytest.raises(OptionError, match=r"'DYNAFUSE_STRIKT' \(did you mean 'DYNAFUSE_STRICT'\?\)") as caught:
        of(environ={"DYNAFUSE_STRIKT": ""})
    for option in OPTIONS:
        assert option.env in str(caught.value)


def test_foreign_reserved_and_empty_variables_are_left_alone() -> None:
    environ = {"PATH": "x", "DYNAFUSE_CACHE_DIR": "x", "DYNAFUSE_NVFUSER_UNMATCHED": "1", "DYNAFUSE_WORKERS": ""}
    assert of(environ=environ) == of()


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_true_in_the_environment(text: str) -> None:
    assert of(environ={"DYNAFUSE_STRICT": text}).strict is True


@pytest.mark.parametrize("text", ["0", "False", "no", "off"])
def test_false_in_the_environment(text: str) -> None:
    assert of(environ={"DYNAFUSE_RECOMPUTE": text}).recompute is False


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ("eager", ("eager",)),
        ("triton", ("triton", "eager")),
        (" eager , triton", ("eager", "triton")),
        (["triton", "triton"], ("triton", "eager")),
        ((), ("eager",)),
    ],
)
def test_eager_is_always_allowed(given: object, resolved: tuple[str, ...]) -> None:
    assert of(None, {"executors": given}).executors == resolved


def test_paths_become_paths() -> None:
    assert of(environ={"DYNAFUSE_REPRO_DIR": "~/repros"}).repro_dir == Path.home() / "repros"
    assert of(None, {"repro_dir": Path("here")}).repro_dir == Path("here")


def test_none_is_a_value_where_it_is_the_default() -> None:
    assert of(None, {"workers": None}, {"DYNAFUSE_WORKERS": "2"}).workers is None


def test_costs_merge_constant_by_constant() -> None:
    environ = {"DYNAFUSE_COST_LAUNCH_US": "2.5", "DYNAFUSE_COST_BANDWIDTH": "100"}
    assert of(None, {"cost": {"launch_us": 4}}, environ).cost == {"launch_us": 4.0, "bandwidth": 100.0}


def test_forced_modules_as_dict_and_as_text() -> None:
    expected = {"model.layers.*.mlp": "triton", "head": "eager?"}
    assert of(environ={"DYNAFUSE_FORCE": "model.layers.*.mlp=triton, head = eager?"}).force == expected
    assert of(None, {"force": "model.layers.*.mlp=triton,head=eager?"}).force == expected
    assert of(None, {"force": expected}).force == expected


def test_forced_modules_merge_pattern_by_pattern_and_options_come_last() -> None:
    config = of(None, {"force": {"head": "triton"}}, {"DYNAFUSE_FORCE": "head=eager,body=eager"})
    assert list(config.force.items()) == [("head", "triton"), ("body", "eager")]


@pytest.mark.parametrize(("given", "message"), [
    ("a=triton,head=egaer", "unknown executor of force pattern 'head': 'egaer' (did you mean 'eager'?); "
                            "valid: eager, inductor, nvfuser, triton"),
    ({"head": "tritn?"}, "unknown executor of force pattern 'head': 'tritn?' (did you mean 'triton'?)"),
    ({"head": 3}, "unknown executor of force pattern 'head': 3"),
    ("a=triton,head", "force entry 'head' names no executor"),
    ("a=triton,", "force entry '' names no executor"),
    ("=triton", "force pattern '' has an empty part"),
    ({"model..mlp": "triton"}, "force pattern 'model..mlp' has an empty part"),
    ({3: "triton"}, "force pattern 3 is no text"),
], ids=range(8))
def test_a_faulty_forced_module_is_named(given: object, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        of(None, {"force": given})
    assert message in str(caught.value)
    if isinstance(given, str):
        with pytest.raises(OptionError) as caught:
            of(environ={"DYNAFUSE_FORCE": given})
        assert message in str(caught.value)


def test_tuning_options() -> None:
    environ = {"DYNAFUSE_TUNE": "never", "DYNAFUSE_TUNE_BUDGET_S": "1.5"}
    assert (of(environ=environ).tune, of(environ=environ).tune_budget_s) == ("never", 1.5)
    assert of(None, {"tune": "always", "tune_budget_s": 3}, environ).tune_budget_s == 3.0


def test_unknown_cost_constants_list_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"'DYNAFUSE_COST_LAUNCH'.*valid: DYNAFUSE_COST_BANDWIDTH, DYNAFUSE_COST_L"):
        of(environ={"DYNAFUSE_COST_LAUNCH": "1"})
    with pytest.raises(OptionError, match=r"unknown cost constant 'launch'.*valid: bandwidth, launch_us"):
        of(None, {"cost": {"launch": 1}})


def test_key_holds_what_changes_code_and_nothing_else() -> None:
    assert of().key() == (("round_like_eager", False), ("fallback_random", False), ("check_indices", True))
    assert of(None, {"workers": 1, "strict": True, "cost": {"launch_us": 1}}).key() == of().key()
    assert of(None, {"round_like_eager": True}).key() != of().key()


def test_a_config_hashes_and_pickles() -> None:
    one = of(None, {"cost": {"launch_us": 1}})
    assert pickle.loads(pickle.dumps(one)) == one
    assert hash(one) == hash(of(None, {"cost": {"launch_us": 1}}))


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_in_the_table(option: Option) -> None:
    table = config.describe()
    assert f"| `{option.name}` | `{option.env}` |" in table
    assert option.doc in table


@pytest.mark.parametrize("given", [{"options": {"stand_ins": True}}, {"environ": {"DYNAFUSE_STAND_INS": "1"}}], ids=str)
def test_older_names_are_taken(given: dict[str, Any]) -> None:
    assert config.resolve(**{"environ": {}, **given}).interim_plan is True
