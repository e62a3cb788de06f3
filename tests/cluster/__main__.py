"""The command line: ``python -m tests.cluster --help``. Exit code 2 for what the caller can put right."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from tests.cluster import processes
from tests.cluster.build import TARGETS, build
from tests.cluster.cluster import DEFAULT_STATE, WORLDS, Cluster, Settings, stop_state
from tests.cluster.errors import SandboxError


def main() -> int:
    arguments = _parser().parse_args()
    try:
        arguments.run(arguments)
    except SandboxError as error:
        print(f"sandbox: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description="A Kubernetes on one machine.")
    state = argparse.ArgumentParser(add_help=False)
    state.add_argument("--state", type=Path, default=DEFAULT_STATE, help="the world's folder (default: %(default)s)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("build", help="build the pinned programs that are missing")
    command.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TARGETS)} (default: all)")
    command.set_defaults(run=_build)

    command = commands.add_parser("up", parents=[state], help="start a world and return when it is ready")
    command.add_argument("world", choices=WORLDS)
    command.add_argument(
        "--image", action="append", default=[], metavar="NAME=PREFIX",
        help="run pods of this image with PREFIX/bin first on PATH (the project's own images: this interpreter's)",
    )  # fmt: skip
    command.add_argument(
        "--resource", action="append", default=[], metavar="NAME=COUNT",
        help="an extended resource that the node claims to have, such as nvidia.com/gpu=8",
    )  # fmt: skip
    command.set_defaults(run=_up)

    for name, run, text in (
        ("down", _down, "end everything of a world, whatever has happened to it"),
        ("status", _status, "what runs, since when, and where its log is"),
        ("env", _env, "exports for a shell: eval \"$(python -m tests.cluster env)\""),
        ("kubeconfig", _kubeconfig, "the path of the admin's kubeconfig"),
    ):  # fmt: skip
        commands.add_parser(name, parents=[state], help=text).set_defaults(run=run)
    return parser


def _build(arguments: argparse.Namespace) -> None:
    print(build(tuple(arguments.names or TARGETS)))


def _up(arguments: argparse.Namespace) -> None:
    build(tuple(TARGETS))
    defaults = Settings()
    settings = Settings(images={**defaults.images, **_pairs(arguments.image)}, resources=_pairs(arguments.resource))
    started = time.monotonic()
    cluster = Cluster.start(arguments.world, arguments.state, owned=False, settings=settings)
    print(f"world '{arguments.world}' is up at {cluster.server} after {time.monotonic() - started:.1f} s")
    print(f"logs: {cluster.logs}")
    suffix = "" if arguments.state == DEFAULT_STATE else f" --state {shlex.quote(str(arguments.state))}"
    print(f'use it:  eval "$(python -m tests.cluster env{suffix})"\nend it:  python -m tests.cluster down{suffix}')


def _down(arguments: argparse.Namespace) -> None:
    state = arguments.state.resolve()
    if (state / "world.json").exists():
        Cluster.attach(state).stop()
    ended = stop_state(state)  # also what an interrupted start or a lost state folder has left
    print(f"down; {ended} stray processes ended" if ended else "down")


def _status(arguments: argparse.Namespace) -> None:
    cluster = Cluster.attach(arguments.state)
    print(f"world '{cluster.world.settings.world}' at {cluster.server}, kubeconfig {cluster.kubeconfig}")
    for name in cluster.components:
        process = cluster.process(name)
        state = f"runs as process {process.pid}" if processes.alive(process) else "has ended"
        print(f"{name:24} {state:26} {cluster.logs / name}.log")


def _env(arguments: argparse.Namespace) -> None:
    for name, value in Cluster.attach(arguments.state).variables.items():
        print(f"export {name}={shlex.quote(value)}")


def _kubeconfig(arguments: argparse.Namespace) -> None:
    print(Cluster.attach(arguments.state).kubeconfig)


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise SandboxError(f"{text!r} is not of the form NAME=VALUE")
        pairs[name] = value
    return pairs


if __name__ == "__main__":
    sys.exit(main())
