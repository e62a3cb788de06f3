"""What the Dockerfile promises, read from its text: it cannot be built where no registry is reached."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Step(NamedTuple):
    word: str
    text: str


class Stage(NamedTuple):
    name: str
    base: str
    steps: list[Step]


def parse() -> tuple[dict[str, str], dict[str, Stage]]:
    """The global arguments with their defaults, and the stages."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages[name] = Stage(name, base, [])
        elif word == "ARG" and not stages:
            key, _, value = rest.partition("=")
            arguments[key] = value
        elif word:
            list(stages.values())[-1].steps.append(Step(word, rest))
    return arguments, stages


ARGUMENTS, STAGES = parse()
SHIPPED = ("operator", "engine", "engine-demo")


def test_targets() -> None:
    assert set(SHIPPED) <= STAGES.keys()
    assert [step.text for step in STAGES["operator"].steps if step.word == "ENTRYPOINT"] == ['["pilotfish-operator"]']
    assert [step.text for step in STAGES["engine"].steps if step.word == "ENTRYPOINT"] == ['["pilotfish-engine"]']


def test_every_base_image_is_an_argument_with_a_default() -> None:
    for stage in STAGES.values():
        argument = re.fullmatch(r"\$\{(\w+)\}", stage.base)
        assert stage.base in STAGES or (argument and ARGUMENTS[argument[1]]), stage.name
    for value in ARGUMENTS.values():
        assert not value.endswith(":latest")


@pytest.mark.parametrize("name", SHIPPED)
def test_runs_as_nobody_in_particular(name: str) -> None:
    """By number, since `runAsNonRoot` cannot judge a name; and last, so that nothing after it is root's."""
    users = [step.text for step in STAGES[name].steps if step.word == "USER"]
    assert users[-1] == "65532:65532"
    after = [step.word for step in STAGES[name].steps]
    assert "RUN" not in after[len(after) - after[::-1].index("USER") :]


def test_everything_from_the_index_is_hashed() -> None:
    installs = [
        call
        for stage in STAGES.values()
        for step in stage.steps
        if step.word == "RUN"
        for call in re.split(r"&&|\|\||;", step.text)
        if "pip install" in call
    ]
    assert installs
    for call in installs:
        ours = call.rstrip(" ;}").endswith("--no-build-isolation --no-deps .")
        assert ours or "--require-hashes -r " in call, call


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())
def test_nothing_secret_goes_in(stage: Stage) -> None:
    for step in stage.steps:
        assert not re.search(r"token|password|secret|api_?key", step.text, re.IGNORECASE)
        if step.word in ("COPY", "ADD"):
            assert step.word == "COPY", "ADD fetches and unpacks"
            assert not re.search(r"(^|\s)\.\s", step.text), "copy what is needed by name"


def test_each_image_has_the_pins_of_its_half() -> None:
    """What these hold is compared by test_dependencies."""
    assert not any("engine.txt" in step.text or "REQUIREMENTS" in step.text for step in STAGES["operator-build"].steps)


def test_only_what_is_copied_is_sent_to_the_builder() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignore[1] == "*"
    sent = {line[1:] for line in ignore if line.startswith("!")}
    copied = {
        source
        for stage in STAGES.values()
        for step in stage.steps
        if step.word == "COPY" and "--from" not in step.text
        for source in step.text.split()[:-1]
    }
    roots = {next((root for root in sent if f"{source}/".startswith(f"{root}/")), source) for source in copied}
    assert roots == sent


def test_requirements_name_no_host() -> None:
    files = sorted((ROOT / "requirements").glob("*.txt"))
    assert files
    for path in files:
        text = path.read_text()
        assert not re.search(r"https?://|--(extra-)?index-url|--find-links|@ ", text), path.name
        entries = [line for line in text.replace("\\\n", " ").splitlines() if not line.startswith("#")]
        assert entries
        assert all("==" in entry and "--hash=sha256:" in entry for entry in entries), path.name
