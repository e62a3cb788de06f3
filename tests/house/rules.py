"""The rules of the house that no other tool checks: `python tests/house/rules.py [ROOT]` prints breaches and exits 1.

Reads sources with `ast` and never imports them. The rules on imports are in pyproject.toml (import-linter), the one on
the environment too (ruff), types are mypy's.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

SOURCE_FOLDERS = ("engine", "operator", "benchmarks", "charts", "examples", "tests")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7
MAX_ATTRIBUTES = 14
MAX_WORDS = 15  # of a docstring's first sentence

# A module is named after what it holds. These words say nothing, and a version in a name keeps two generations alive.
BANNED_NAME = re.compile(r"(^|_)(utils?|common|helpers?|managers?|v\d+)($|_)", re.IGNORECASE)

# `operator/__init__.py` would be a package that shadows the standard library's `operator`.
MUST_BE_ABSENT = ("operator/__init__.py", "engine/__init__.py")

# The functional core: values in, values out. Imports of I/O are import-linter's; these need no import.
CORE = (
    "engine/pilotfish_engine/contract",
    "engine/pilotfish_engine/kv/pages.py",
    "engine/pilotfish_engine/kv/prefix.py",
    "engine/pilotfish_engine/scheduler/policy.py",
    "operator/pilotfish_operator/plan.py",
    "operator/pilotfish_operator/autoscale.py",
    "operator/pilotfish_operator/tune.py",
    "operator/pilotfish_operator/objects.py",
    "operator/pilotfish_operator/status.py",
)
IO_BUILTINS = {"open", "print", "input", "breakpoint", "__import__"}
CLOCK_CALLS = {"now", "utcnow", "today"}

# Methods of speculation, known by name only in their table, where they live, where drafts are loaded and where a
# person types them; the operator knows none.
METHOD_NAME = re.compile(r"(eagle\d?|ngram|standalone|mtp|nextn|dflash|dspark|medusa)", re.IGNORECASE)
KNOWS_METHODS = (
    "engine/pilotfish_engine/contract/methods.py",
    "engine/pilotfish_engine/speculation",
    "engine/pilotfish_engine/model",
    "engine/pilotfish_engine/train",
    "engine/pilotfish_engine/cli.py",
)


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """(path relative to root, text) of every Python file of the project."""
    for folder in SOURCE_FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def within(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(place + "/") for place in places)


def sizes(path: str, text: str, tree: ast.Module) -> Iterator[str]:
    lines = text.count("\n") + (not text.endswith("\n"))
    if lines > MAX_FILE_LINES:
        yield f"{path}: {lines} lines; at most {MAX_FILE_LINES}: split it by what its parts know"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines; at most {MAX_FUNCTION_LINES}"


def parameters(path: str, tree: ast.Module) -> Iterator[str]:
    """A long signature hides a value that has no name yet. Triton's is the machine's: it knows numbers alone."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any("triton" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        given, starred = node.args, (node.args.vararg, node.args.kwarg)
        found = [*given.posonlyargs, *given.args, *given.kwonlyargs, *(arg for arg in starred if arg)]
        count = len(found) - (bool(found) and found[0].arg in ("self", "cls"))
        if count > MAX_PARAMETERS:
            yield (
                f"{path}:{node.lineno}: {node.name} has {count} parameters; at most {MAX_PARAMETERS}: name what "
                "belongs together"
            )


def attributes(path: str, tree: ast.Module) -> Iterator[str]:
    """A class of many attributes holds a value that has no name yet; what a base declares has one."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        found = {target.id for target in _targets(node.body) if isinstance(target, ast.Name)}
        for target in _targets(ast.walk(node)):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                found.add(target.attr)
        if len(found) > MAX_ATTRIBUTES:
            yield (
                f"{path}:{node.lineno}: {node.name} declares {len(found)} attributes; at most {MAX_ATTRIBUTES}: name "
                "what belongs together"
            )


def _targets(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """What assignments give a value to, tuples taken apart."""
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from target.elts if isinstance(target, ast.Tuple) else [target]


def names(path: str) -> Iterator[str]:
    for part in Path(path).with_suffix("").parts:
        if BANNED_NAME.search(part):
            yield f"{path}: '{part}' says nothing about what is in it; name it after what it holds"


def docstring(path: str, tree: ast.Module) -> Iterator[str]:
    """A package's module says first what it knows and what it does not. Tests are named by what they prove."""
    if not path.startswith("tests/") and tree.body and not ast.get_docstring(tree):
        yield f"{path}: no module docstring; it is the module's contract"


def first_sentences(path: str, tree: ast.Module) -> Iterator[str]:
    """Of modules and of what is public in them. A sentence ends at a full stop, a colon or a semicolon; shapes and what
    stands in brackets are no words."""
    if path.startswith("tests/"):
        return
    for name, node in [("the module", tree), *_public(tree)]:
        paragraph = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
        sentence = re.split(r"(?<=[.!?;:])\s", paragraph, maxsplit=1)[0]
        count = sum(bool(re.search("[A-Za-z]", word)) for word in re.sub(r"\[[^]]*\]|\([^)]*\)", "", sentence).split())
        if count > MAX_WORDS:
            line = getattr(node, "lineno", 1)
            yield f"{path}:{line}: {name} is described in a first sentence of {count} words; at most {MAX_WORDS}"


def _public(tree: ast.Module | ast.ClassDef) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node.name, node
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public(node)


def purity(path: str, tree: ast.Module) -> Iterator[str]:
    if not within(path, CORE):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in IO_BUILTINS:
            yield f"{path}:{node.lineno}: {node.func.id}() in the functional core; do it in the caller"
        if isinstance(node.func, ast.Attribute) and node.func.attr in CLOCK_CALLS:
            yield f"{path}:{node.lineno}: .{node.func.attr}() in the functional core; take the time as an argument"


def method_names(path: str, tree: ast.Module) -> Iterator[str]:
    if not path.startswith(("engine/", "operator/")) or within(path, KNOWS_METHODS):
        return
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        for word in [] if id(node) in prose else _words(node):
            if path.startswith("operator/") and word.islower():  # manifests have capitals, and kopf a word `standalone`
                continue
            if METHOD_NAME.search(word):
                line = getattr(node, "lineno", 1)
                yield f"{path}:{line}: '{word}' names a method; only the table, speculation/, loaders and the cli may"


def _words(node: ast.AST) -> list[str]:
    """What a node calls things: its identifiers, or the text of a string."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
            return [name]
        case ast.ImportFrom(module=str(name)):
            return [name]
    return []


def breaches(root: Path) -> list[str]:
    """Every breach under `root`, one sentence each, in the order of the files."""
    found = [
        f"{path} must not exist: the folder is a source root, and 'operator' is the standard library's"
        for path in MUST_BE_ABSENT
        if (root / path).exists()
    ]
    for path, text in sources(root):
        tree = ast.parse(text, filename=path)
        for rule in (sizes(path, text, tree), parameters(path, tree), attributes(path, tree)):
            found += rule
        for rule in (names(path), docstring(path, tree), first_sentences(path, tree)):
            found += rule
        for rule in (purity(path, tree), method_names(path, tree)):
            found += rule
    return found


def main() -> int:
    found = breaches(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
    print("\n".join(found) or "rules of the house: kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
