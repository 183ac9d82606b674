"""Writes docs/evidence/tested.md, what the tests cover, from the tests themselves.

Nobody edits that page by hand. Ranks, types, peers and faults are read from the code that tests
reach, without running it; versions from .github/workflows/ci.yml and requirements/; deliberate
faults from tools/mutants/results.json. Run: python tools/tested.py, with --check to compare only.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / "tests/python"
PAGE = ROOT / "docs/evidence/tested.md"
# Fixtures of tests/conftest.py, and calls whose first arguments are numbers of ranks.
FIXTURES = {"pair": {2}, "trio": {3}, "workers": {1, 2, 3, 4}}
POOLS = {"on_ranks", "pool", "Workers"}
SIZES = {"world_size", "size"}
DTYPES = (
    *("float64", "float32", "bfloat16", "float16", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
# A cell of the table, and the dotted names of which each shows it in code that a test reaches.
PEERS = {
    "Gloo": {"context.oracle"},
    "torch.optim": {"torch.optim"},
    "DDP": {"DistributedDataParallel"},
    "FSDP": {"fully_shard", "FullyShardedDataParallel"},
    "DTensor": {"DTensor", "distribute_tensor"},
    "torch.compile": {"torch.compile"},
    "torch's checkpoints": {"get_optimizer_state_dict", "dcp.save", "dcp.load"},
    "GradScaler": {"torch.amp.GradScaler"},
}
FAULTS = {
    "a killed rank": {"signal.SIGKILL"},
    "a stopped rank": {"signal.SIGSTOP"},
    "interrupts": {"signal.SIGINT", "signal.SIGTERM", "signal.SIGHUP"},
    "abort": {"dist.abort", "c10d._abort_process_group", "_abort_process_group"},
    "fork": {"os.fork"},
    "too little memory": {"resource.setrlimit"},
}
# What fuzz.core calls of the file of a random subject.
SUBJECT = ("draw", "run", "oracle", "check", "workers")
Definition = tuple[Path, str]


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an expression that is only names; else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


class Module:
    """A file's definitions, and what its names of other modules of the tests mean."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.definitions: dict[str, ast.stmt] = {}
        self.modules: dict[str, Path] = {}
        self.names: dict[str, Definition] = {}
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.definitions[node.name] = node
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            self.definitions[name.id] = node
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self._import(node.module, alias.name, alias.asname or alias.name)

    def _import(self, module: str, name: str, known_as: str) -> None:
        base = PYTHON / module.replace(".", "/")
        if (base / f"{name}.py").is_file():
            self.modules[known_as] = base / f"{name}.py"
        elif base.with_suffix(".py").is_file() and module != "harness":
            self.names[known_as] = base.with_suffix(".py"), name

    def used(self, node: ast.AST) -> Iterator[Definition]:
        """Definitions of the tests that some code names, and those of its random subjects."""
        for file in subjects_of(node):
            yield from ((file, name) for name in SUBJECT)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name):
                if inner.id in self.names:
                    yield self.names[inner.id]
                elif inner.id in self.definitions:
                    yield self.path, inner.id
            elif isinstance(inner, ast.Attribute) and dotted(inner.value) in self.modules:
                yield self.modules[dotted(inner.value)], inner.attr


@functools.cache
def module(path: Path) -> Module:
    return Module(path)


def literal(path: Path, name: str) -> Any:
    """A constant of a file, which must be written out."""
    node = module(path).definitions[name]
    assert isinstance(node, ast.Assign)
    return ast.literal_eval(node.value)


def subjects_of(node: ast.AST) -> Iterator[Path]:
    """Files of the subjects of random programs that some code runs by name."""
    known = literal(PYTHON / "fuzz/core.py", "SUBJECTS")
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and dotted(inner.func) in {"core.search", "search"}:
            first = inner.args[0]
            if isinstance(first, ast.Constant) and first.value in known:
                yield PYTHON / f"{known[first.value].replace('.', '/')}.py"


def tests_of(path: Path) -> list[ast.FunctionDef]:
    found = module(path).definitions.items()
    return [n for name, n in found if name.startswith("test_") and isinstance(n, ast.FunctionDef)]


def reached(path: Path) -> list[ast.stmt]:
    """The tests of a file, and what they use of this file and of others."""
    todo: list[Definition] = [(path, test.name) for test in tests_of(path)]
    seen = set(todo)
    nodes = []
    while todo:
        file, name = todo.pop()
        node = module(file).definitions.get(name)
        if node is None:
            continue
        nodes.append(node)
        for definition in module(file).used(node):
            if definition not in seen:
                seen.add(definition)
                todo.append(definition)
    return nodes


def integers(nodes: Iterable[ast.AST]) -> set[int]:
    """Small literal integers, also in lists and in calls as slow(4)."""
    inner = (one for node in nodes for one in ast.walk(node) if isinstance(one, ast.Constant))
    return {one.value for one in inner if type(one.value) is int and 0 < one.value <= 64}


def ranks_of(test: ast.FunctionDef) -> set[int]:
    """The sizes of the pools that a test names, or that its random subjects' programs run on."""
    sizes = set().union(*map(ranks_of_subject, subjects_of(test)))
    for argument in test.args.args:
        sizes |= FIXTURES.get(argument.arg, set())
    for node in ast.walk(test):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func).rpartition(".")[2]
        if name == "parametrize" and isinstance(node.args[0], ast.Constant):
            if node.args[0].value in SIZES:
                sizes |= integers(node.args[1:2])
        elif name in POOLS:
            sizes |= integers(node.args if name == "on_ranks" else node.args[:1])
    return sizes


@functools.cache
def ranks_of_subject(path: Path) -> set[int]:
    """The sizes of the pools on which a subject's programs run: WHERE, and what it is made of."""
    sizes: set[int] = set()
    if isinstance(own := module(path).definitions.get("workers"), ast.FunctionDef):
        sizes |= ranks_of(own)
    hosts = literal(PYTHON / "harness.py", "HOSTS")
    todo, seen = [(path, "WHERE")], set()
    while todo:
        seen.add(definition := todo.pop())
        file, name = definition
        node = module(file).definitions[name]
        sizes |= integers([node])
        for inner in ast.walk(node):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                place = inner.value.partition(", ")[0]  # behind it stands what else is drawn
                sizes |= {len(hosts[place])} if place in hosts else set()
                sizes |= {int(size) for size in re.findall(r"\b\d\b", place)}
        todo += [one for one in module(file).used(node) if one not in seen]
    return sizes


def dtypes_of(node: ast.AST) -> set[str]:
    """Types that are a test's parameters, stand in a constant that it uses, or are drawn."""
    lists: list[ast.AST] = [node] if isinstance(node, (ast.Assign, ast.AnnAssign)) else []
    if isinstance(node, ast.FunctionDef):
        lists += [one for one in node.decorator_list if isinstance(one, ast.Call)]
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and dotted(inner.func).endswith(".choice"):
            lists += inner.args
    names = {dotted(inner) for one in lists for inner in ast.walk(one)}
    return {dtype for dtype in DTYPES if f"torch.{dtype}" in names}


def shown(wanted: dict[str, set[str]], nodes: Iterable[ast.AST]) -> list[str]:
    names = {dotted(inner) for node in nodes for inner in ast.walk(node)}
    prefixes = {name[: match.start()] for name in names for match in re.finditer(r"\.", name)}
    return [cell for cell, signs in wanted.items() if signs & (names | prefixes)]


def capabilities() -> Iterator[tuple[str, list[Path]]]:
    """Rows of tests/python/parts.py that have tests here."""
    sys.path.insert(0, str(PYTHON))
    import parts

    files = sorted([*PYTHON.glob("test_*.py"), *PYTHON.glob("fuzz/test_*.py")])
    for name in parts.CAPABILITIES:
        mine = [file for file in files if parts.capability(file.name) == name]
        if mine:
            yield name, mine


def matrix(text: str) -> Iterator[str]:
    """Rows of the jobs of ci.yml that have one."""
    for job in re.split(r"^  (?=\w)", text, flags=re.MULTILINE):
        commands = re.findall(r"run: (make .+)$", job, re.MULTILINE)
        what = ", ".join(f"`{command}`" for command in commands)
        listed = dict(re.findall(r"^ +(python|torch): \[(.+)\]$", job, re.MULTILINE))
        pairs = re.findall(r'python: "(.+?)", torch: "(.+?)"', job)
        if len(listed) == 2:
            python, torch = (listed[key].replace('"', "") for key in ("python", "torch"))
            yield f"| each of {python} | each of {torch} | {what} |"
        for python, torch in pairs:
            yield f"| {python} | {torch} | {what} |"


def mutants(saved: dict[str, Any]) -> Iterator[str]:
    rooms: dict[str, list[dict[str, Any]]] = {}
    for mutant in saved["mutants"]:
        rooms.setdefault(mutant["room"], []).append(mutant)
    yield "| part | run | caught | survived | not caught yet |"
    yield "|---|---:|---:|---|---|"
    for room, listed in rooms.items():
        left: dict[bool, list[str]] = {True: [], False: []}
        for mutant in listed:
            if not mutant["caught"]:
                left[mutant["whole"]].append(f"`{mutant['id']}`")
        caught = sum(mutant["caught"] for mutant in listed)
        cells = [room, len(listed), caught, ", ".join(left[True]), ", ".join(left[False])]
        yield f"| {' | '.join(map(str, cells))} |"


def page() -> str:
    lines = [
        "# What is tested",
        "",
        "`python tools/tested.py` wrote this page from the code of the tests, and a test checks"
        " that it is up to date. It says what tests and their random programs name; an empty cell"
        " means that none names any.",
        "",
        "## By capability",
        "",
        "*Types* are parameters of tests, stand in a list that a test uses, or are drawn. *Beside*"
        " is what of torch takes part in the same tests, mostly as the definition of what is right."
        " `make test` runs most functions once, `make test-rest` the rest.",
        "",
        "| capability | ranks | types | beside | faults | files in tests/python |",
        "|---|---|---|---|---|---|",
    ]
    for name, files in capabilities():
        nodes = [node for file in files for node in reached(file)]
        sizes = sorted({n for file in files for test in tests_of(file) for n in ranks_of(test)})
        types = set().union(*map(dtypes_of, nodes))
        cells = [
            name,
            ", ".join(map(str, sizes)),
            ", ".join(dtype for dtype in DTYPES if dtype in types),
            ", ".join(shown(PEERS, nodes)),
            ", ".join(shown(FAULTS, nodes)),
            ", ".join(f"`{file.stem.removeprefix('test_')}`" for file in files),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    saved = json.loads((ROOT / "tools/mutants/results.json").read_text())
    days = [mutant.get("date", saved["date"]) for mutant in saved["mutants"]]
    frameworks = (ROOT / "requirements/frameworks.txt").read_text()
    lines += [
        "",
        "The engine has tests of its own in `tests/cpp`, which also run under AddressSanitizer,"
        " ThreadSanitizer and as aarch64 code; the CUDA engine runs there on a fake GPU, and"
        " `tests/gpu` needs a real one.",
        "",
        "## Versions",
        "",
        "| Python | torch | what runs |",
        "|---|---|---|",
        *matrix((ROOT / ".github/workflows/ci.yml").read_text()),
        "",
        "`make test-frameworks` runs "
        + ", ".join(re.findall(r"^([\w\-]+==[\w.]+)$", frameworks, re.MULTILINE))
        + ".",
        "",
        "## Deliberate faults",
        "",
        "A mutant is the code with one fault put in on purpose"
        " ([Contributing](../../CONTRIBUTING.md#mutants)). The results are of"
        f" {' to '.join(sorted({min(days), max(days)}))}; mutants that were written later have"
        " none. One that has *survived* is a place where a fault could go unnoticed; against one"
        " that is *not caught yet* only some of the tests were run.",
        "",
        *mutants(saved),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    text = page()
    if "--check" in arguments:
        if not PAGE.is_file() or PAGE.read_text() != text:
            print(f"{PAGE.relative_to(ROOT)} is old: run python tools/tested.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
