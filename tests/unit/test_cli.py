"""Flags, the YAML file and the help come from `Config` alone."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oasis_tp.cli import config_flags, main, parse_config
from oasis_tp.config import Config, SparsityConfig, SpeculationConfig
from oasis_tp.llm import make_config
from oasis_tp.validation import validate

FLAGS = """
--model --dtype --load-format --max-model-len --served-model-name --chat-template --revision --seed
--attention-backend --enforce-eager
--tensor-parallel-size --distributed-timeout-seconds --device --comm --numa-bind --check-ranks
--gpu-memory-utilization --device-kv-gb --host-kv-gb --kv-offloading-size --kv-cache-dtype --block-size
--attention --budget-tokens --recent-tokens --sink-blocks --hot-factor --sketch --tail-estimate --prefetch --fetch-ratio
--spec-method --spec-model --spec-tokens --prompt-lookup-max --prompt-lookup-min
--max-num-seqs --max-num-batched-tokens --max-num-queued-reqs
--host --port --uds --api-key --api-key-file --shutdown-timeout --watchdog-timeout --sse-keep-alive-interval
--log-format --log-level
"""


def parse(*arguments: str) -> Config:
    return parse_config(arguments, "prog", "A test.")[0]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        parse(*arguments)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_the_list_of_flags_is_reviewed() -> None:
    assert [flag.option for flag in config_flags()] == FLAGS.split()


def test_no_arguments_give_the_defaults_and_they_are_valid() -> None:
    assert parse() == Config()
    validate(Config())


def test_values_of_every_type() -> None:
    config = parse(
        "some/dir", "-tp", "2", "--max-model-len", "8k", "--served-model-name", "a", "b", "--no-tail-estimate",
        "--check-ranks", "--hot-factor", "2.5", "--block-size", "32", "--host-kv-gb", "0", "--budget-tokens=1.5K",
    )  # fmt: skip
    assert (config.model.model, config.parallel.tensor_parallel_size) == ("some/dir", 2)
    assert (config.model.max_model_len, config.sparsity.budget_tokens) == (8000, 1536)
    assert config.model.served_model_name == ("a", "b")
    assert (config.sparsity.tail_estimate, config.parallel.check_ranks) == (False, True)
    assert (config.sparsity.hot_factor, config.memory.block_size, config.memory.host_kv_gb) == (2.5, 32, 0.0)
    assert parse("--hot-factor", "auto").sparsity.hot_factor == "auto"


@pytest.mark.parametrize("arguments", [("--port", "0", "m"), ("m", "--port", "0"), ("--model", "m", "--port", "0")])
def test_the_model_may_stand_anywhere(arguments: tuple[str, ...]) -> None:
    assert parse(*arguments).model.model == "m"


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "preset.yaml"
    file.write_text(
        "model: m\nmax-model-len: 8K\nbudget_tokens: 256\ntail-estimate: false\nserved-model-name: [a, b]\n"
    )
    config = parse("--config", str(file), "--budget-tokens", "512")
    assert (config.model.model, config.model.max_model_len, config.model.served_model_name) == ("m", 8192, ("a", "b"))
    assert (config.sparsity.budget_tokens, config.sparsity.tail_estimate) == (512, False)
    assert parse("--config", str(file), "other", "--tail-estimate").model.model == "other"


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_presets_are_valid(path: Path) -> None:
    assert parse("--config", str(path)).model.model in path.read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("budget-token: 3", "did you mean --budget-tokens?"),
        ("tail-estimate: 3", "true, false"),
        ("port: [1, 2]", "one value"),
        ("port: high", "whole number"),
        ("port: true", "whole number"),
        ("sketch: 3bit", "2bit"),
        ("- a", "flag: value"),
        ("a: [", "--config"),
        ("port: 70000", "--port is 70000"),
    ],
)
def test_a_faulty_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    file = tmp_path / "preset.yaml"
    file.write_text(text)
    assert said in refused(capsys, "--config", str(file))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--budget-token 3", "unknown option --budget-token; did you mean --budget-tokens?"),
        ("--budget-tok=3", "unknown option --budget-tok;"),
        ("--budget-tokens 0", "--budget-tokens is 0; allowed: a whole number from 1"),
        ("--budget-tokens 1.5", "not a whole number"),
        ("--recent-tokens 8", "--recent-tokens is 8; allowed: at least one block (16 tokens)"),
        ("--recent-tokens 16 --block-size 32", "--recent-tokens"),
        ("--hot-factor 0.5", "--hot-factor"),
        ("--hot-factor nan", "--hot-factor"),
        ("--hot-factor 1e300", "--hot-factor is 1e+300; allowed: auto, or a number from 1 to 1048576"),
        ("--kv-offloading-size=-1", "--kv-offloading-size"),
        ("--kv-offloading-size 1 --host-kv-gb 1", "--host-kv-gb 1 (per rank) and --kv-offloading-size 1 (in all)"),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype"),
        ("--trust-remote-code", "--trust-remote-code: no code of a model is ever run"),
        ("--speculative-config", "--speculative-config"),
        ('--speculative-config={"methd":"ngram"}', "unknown key methd; did you mean method?"),
        ('--speculative-config {"method":"ngram","num_speculative_tokens":99}', "--spec-tokens is 99"),
        ('--speculative-config {"method":"medusa"}', "--spec-method"),
        ("--hot-factor warm", "neither auto nor a number"),
        ("--sink-blocks=-1", "--sink-blocks"),
        ("--gpu-memory-utilization 1.1", "--gpu-memory-utilization"),
        ("--gpu-memory-utilization nan", "--gpu-memory-utilization"),
        ("--device-kv-gb 0", "--device-kv-gb"),
        ("--host-kv-gb inf", "--host-kv-gb"),
        ("--max-model-len 1", "--max-model-len"),
        ("--spec-method ngram --recent-tokens 16", "--recent-tokens is 16; allowed: with drafts at least 21"),
        ("--spec-tokens 0", "--spec-tokens"),
        ("--prompt-lookup-min 5", "--prompt-lookup-min is 5; allowed: 1 to --prompt-lookup-max (4)"),
        ("--max-num-seqs 0", "--max-num-seqs"),
        ("--max-num-batched-tokens 8", "--max-num-batched-tokens is 8; allowed: at least 16"),
        ("--max-num-queued-reqs 0", "--max-num-queued-reqs"),
        ("--port 65536", "--port"),
        ("--api-key=", "--api-key"),
        ("--shutdown-timeout=-1", "--shutdown-timeout"),
        ("--watchdog-timeout 0", "--watchdog-timeout is 0.0; allowed: seconds from 1"),
        ("--sse-keep-alive-interval nan", "--sse-keep-alive-interval"),
        ("-tp 0", "--tensor-parallel-size"),
        ("--distributed-timeout-seconds 0", "--distributed-timeout-seconds"),
        ("--dtype int4", "--dtype"),
        ("a b", "more than one model"),
        ("a --model b", "given twice"),
        ("--config /no/such/file", "No such file"),
    ],
)
def test_a_faulty_command_line_is_refused(capsys: pytest.CaptureFixture[str], arguments: str, said: str) -> None:
    assert said in refused(capsys, *arguments.split())


def test_options_of_vllm_s_names() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}'
    config = parse("m", "--speculative-config", text, "--kv-offloading-size", "3", "--kv-cache-dtype", "auto")
    speculation = config.speculation
    assert (speculation.spec_method, speculation.spec_tokens, speculation.prompt_lookup_max) == ("ngram", 3, 5)
    assert (config.memory.host_gib(4), parse("--host-kv-gb", "2").memory.host_gib(4)) == (0.75, 2)
    assert parse().memory.host_gib(4) is None


@pytest.mark.parametrize("command", ["oasis_tp.cli", "oasis_tp.serve"])
def test_help_may_be_cut_off(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", command, "--help"], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


def test_an_entry_adds_its_own_options() -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--prompt", default="hi")

    config, own = parse_config(["m", "--prompt", "x"], "prog", "A test.", extra)
    assert (config.model.model, vars(own)) == ("m", {"prompt": "x"})
    assert parse_config([], "prog", "A test.", extra)[1].prompt == "hi"


def test_help_is_generated_and_fits_100_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as exit_:
        parse("--help")
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert SparsityConfig.__doc__ is not None and SparsityConfig.__doc__ in text
    for flag in config_flags():
        assert flag.option in text and " ".join(flag.help.split()[:3]) in " ".join(text.split())


def test_the_command_says_what_the_machine_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env"]) == 0
    text = capsys.readouterr().out
    for name in ("oasis-tp ", "torch ", "memory ", "locked memory", "/dev/shm", "NUMA nodes", "launchers"):
        assert name in text
    assert str(Path.home()) not in text


def test_the_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert main(["serv"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err
    assert main([]) == 2


@pytest.mark.parametrize(("option", "value"), [("attention", "lossless"), ("sketch", "3bit"), ("block_size", 17)])
def test_python_callers_get_the_same_checks(option: str, value: object) -> None:
    from oasis_tp.llm import make_config

    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} is {value!r}; allowed: "):
        make_config(**{option: value})


def test_speculative_config_stands_for_the_flags(tmp_path: Path) -> None:
    """vLLM's names, from the command line, from a file as a mapping or as text, and from Python."""
    text = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}'
    expected = SpeculationConfig(spec_method="ngram", spec_tokens=3, prompt_lookup_max=5)
    assert parse("--speculative-config", text).speculation == expected
    for index, line in enumerate((text, f"'{text}'")):
        file = tmp_path / f"{index}.yaml"
        file.write_text(f"speculative-config: {line}\n")
        assert parse("--config", str(file)).speculation == expected
        assert parse("--config", str(file), "--spec-tokens", "2").speculation.spec_tokens == 2
    assert make_config(speculative_config={"method": "ngram", "num_speculative_tokens": 3}).speculation.spec_tokens == 3
    assert parse("--speculative-config", text, "--spec-tokens", "3").speculation == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "'{' is no JSON"),
        ("[1]", "--speculative-config is [1]; allowed: a JSON object"),
        ('{"method": "ngram", "num_tokens": 3}', "unknown key num_tokens"),
        (
            '{"method": "ngram", "num_speculative_tokens": "3"}',
            "num_speculative_tokens is '3'; allowed: a whole number",
        ),
        ('{"model": "some/dir"}', "method is missing; allowed: none, ngram, draft_model, eagle3"),
        ('{"method": "medusa"}', "--spec-method is 'medusa'; allowed: none, ngram, draft_model, eagle3"),
        ('{"method": "eagle3"}', "--spec-model is ''; allowed: a model"),
    ],
)
def test_speculative_configs_that_are_refused(capsys: pytest.CaptureFixture[str], given: str, message: str) -> None:
    assert message in refused(capsys, "--speculative-config", given)


def test_speculative_config_may_not_contradict_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "--speculative-config", '{"method": "ngram"}', "--spec-method", "none")
    assert "--spec-method none and --speculative-config contradict each other: 'ngram' there" in error
    with pytest.raises(ValueError, match="given twice, also in speculative_config: spec_method"):
        make_config(spec_method="ngram", speculative_config={"method": "ngram"})
