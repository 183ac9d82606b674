"""Measures how many deliberate faults (mutants) the tests notice.

tools/mutants/*.toml lists mutants as data. Each replaces one piece of a source file and is found
by its text, so that the list survives edits of other lines. C++ mutants are all compiled into one
build and chosen by the environment variable FUSEDPG_MUTANT; Python mutants are edits of a private
copy of the tree. A mutant is caught when a test fails that passes without it, or when it hangs.

    python tools/mutants.py check                 # does every mutant still fit the sources?
    python tools/mutants.py build                 # copies the tree and builds it with all mutants
    python tools/mutants.py run [-j 2] [NAME...]  # resumes; NAME: part of a name, a room or a path
    python tools/mutants.py report                # writes the table of what is known so far

What the last report has written (tools/mutants/results.json) is known in a fresh clone, too.

Each needs an environment like that of `make test`: run it as .venv/bin/python.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import fcntl
import functools
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
VARIABLE = "FUSEDPG_MUTANT"
HEADER = "fusedpg_mutant_choice.h"
# Without <cstdlib>, so that it may stand anywhere outside of a function, and without a weak symbol,
# which files compiled for one instruction set must not have.
CHOICE = f"""\
#ifndef FUSEDPG_MUTANT_CHOICE
#define FUSEDPG_MUTANT_CHOICE
extern "C" char* getenv(const char*) noexcept;
static long fusedpg_read_mutant() {{
  const char* text = ::getenv("{VARIABLE}");
  long chosen = 0;
  for (; text != nullptr && *text >= '0' && *text <= '9'; ++text) {{
    chosen = 10 * chosen + (*text - '0');
  }}
  return chosen;
}}
[[maybe_unused]] static const long fusedpg_mutant_chosen = fusedpg_read_mutant();
#endif
"""
# A test hangs that takes so many times as long as it has taken at most, but not before so many
# seconds; of one that has never passed here nothing is known yet.
SLOWER = 4
LEAST_LIMIT = 20.0
FIRST_LIMIT = {"C++": 40.0, "Python": 120.0}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault. `old` occurs once in `at`, and `at` once in the file."""

    id: str
    file: str
    old: str
    new: str
    at: str
    tests: tuple[str, ...]
    form: str  # "statement" or "expression" (C++), "text" (Python)
    equivalent: str  # why no test can notice it; empty: one should
    room: str
    room_tests: tuple[str, ...]

    @property
    def number(self) -> int:
        return zlib.crc32(self.id.encode()) & 0x7FFFFFFF or 1

    @property
    def digest(self) -> str:
        text = "\n".join((self.file, self.at, self.old, self.new))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def compiled(self) -> bool:
        return self.form != "text"


class ListError(Exception):
    """A mutant that does not fit its file."""


@dataclasses.dataclass(frozen=True, eq=False)
class Project:
    """What tools/mutants/project.toml says."""

    root: Path
    work: Path  # copies, the build and the results
    mutants: tuple[Mutant, ...]
    build: tuple[tuple[str, ...], ...]  # commands
    install: tuple[str, ...]  # of the build folder, copied into the tree
    cpp_tests: tuple[str, ...]  # the command that runs C++ tests
    cpp_sources: tuple[str, ...]  # of them: patterns of files
    env: dict[str, str]
    preludes: dict[str, str]  # pattern of a file: the file that includes HEADER for it

    @property
    def saved(self) -> Path:
        return self.root / "tools/mutants/results.json"

    @property
    def tree(self) -> Path:
        return self.work / "tree-0"

    @property
    def build_folder(self) -> Path:
        return self.work / "build"

    def words(self, words: Iterable[str]) -> list[str]:
        return [word.format(**self.places(self.tree)) for word in words]

    def places(self, tree: Path) -> dict[str, Any]:
        """What words of project.toml in braces mean."""
        packages = sysconfig.get_path("purelib")
        python = sys.executable
        return {"tree": tree, "build": self.build_folder, "python": python, "packages": packages}


def form_of(file: str, old: str) -> str:
    if file.endswith(".py"):
        return "text"
    return "statement" if old.endswith(";") or (old.endswith("}") and ";" in old) else "expression"


def load(root: Path, work: Path | None = None) -> Project:
    """The project's settings and its mutants."""
    folder = root / "tools/mutants"
    config = tomllib.loads((folder / "project.toml").read_text())
    rooms = config["room"]
    mutants = []
    for path in sorted(folder.glob("*.toml")):
        if path.name == "project.toml":
            continue
        for entry in tomllib.loads(path.read_text())["mutant"]:
            found = [r for r in rooms if any(entry["file"].startswith(p) for p in r["paths"])]
            if not found:
                raise ListError(f"{entry['id']}: {entry['file']} is in no room of project.toml")
            room = max(found, key=lambda r: max(map(len, r["paths"])))
            mutants.append(
                Mutant(
                    id=entry["id"],
                    file=entry["file"],
                    old=entry["old"],
                    new=entry["new"],
                    at=entry.get("at", entry["old"]),
                    tests=tuple(entry.get("tests", ())),
                    form=entry.get("form", form_of(entry["file"], entry["old"])),
                    equivalent=entry.get("equivalent", ""),
                    room=room["name"],
                    room_tests=tuple(room["tests"]),
                )
            )
    names = [m.id for m in mutants]
    numbers = [m.number for m in mutants]
    for known in (names, numbers):
        if len(set(known)) != len(known):
            twice = sorted({str(k) for k in known if known.count(k) > 1})
            raise ListError(f"mutants with one name or number: {', '.join(twice)}")
    return Project(
        root=root,
        work=work or root / "build/mutants",
        mutants=tuple(mutants),
        build=tuple(tuple(command) for command in config["build"]["commands"]),
        install=tuple(config["build"].get("install", ())),
        cpp_tests=tuple(config["build"]["cpp_tests"]),
        cpp_sources=tuple(config["build"]["cpp_sources"]),
        env=config.get("env", {}),
        preludes=config.get("preludes", {}),
    )


# --- rewriting -------------------------------------------------------------------


def span(mutant: Mutant, text: str) -> tuple[int, int]:
    """Where `old` lies in the file."""
    for what, inside in ((mutant.at, text), (mutant.old, mutant.at)):
        if inside.count(what) != 1:
            how = "has gone from" if what not in inside else "is not unique in"
            raise ListError(f"{mutant.id}: its text {how} {mutant.file}: {what!r}")
    begin = text.index(mutant.at) + mutant.at.index(mutant.old)
    return begin, begin + len(mutant.old)


def both(mutant: Mutant, otherwise: str) -> str:
    """C++ that does what FUSEDPG_MUTANT says. Lines keep their numbers as far as possible."""
    chosen = f"(fusedpg_mutant_chosen == {mutant.number}L)"
    if mutant.form == "expression":
        return f"({chosen} ? ({mutant.new}) : ({otherwise}))"
    if mutant.form == "statement":
        return f"if {chosen} {{ {mutant.new} }} else {{ {otherwise} }}"
    raise ListError(f"{mutant.id}: form {mutant.form!r} is none of expression and statement")


def outside_brackets(text: str) -> str:
    while (less := re.sub(r"\([^()\[\]{}]*\)|\[[^()\[\]{}]*\]|{[^()\[\]{}]*}", "_", text)) != text:
        text = less
    return text


def check_form(mutant: Mutant, text: str) -> None:
    """Raises unless its two texts can stand where both() puts them, as far as that shows without a
    compiler, which sees the list only when somebody builds it."""
    begin, _ = span(mutant, text)
    before = re.sub(r"//[^\n]*", "", text[:begin]).rstrip()
    for code in (mutant.old, mutant.new):
        outside = outside_brackets(code)
        if re.search(r"[()\[\]{}]|//", outside):
            raise ListError(f"{mutant.id}: a bracket is missing, or a comment is in {code!r}")
        if mutant.form == "expression" and not re.search(r"^[^,;]*[\w\"']\s*$", outside):
            raise ListError(f"{mutant.id}: no whole expression: {code!r}")
    if mutant.form == "statement" and not before.endswith((*";{}):", "else")):
        raise ListError(f"{mutant.id}: {mutant.old!r} is only the end of a statement")


def rewrite(text: str, mutants: Iterable[Mutant]) -> str:
    """A C++ file with all of its mutants; several may replace the same text."""
    places: dict[tuple[int, int], list[Mutant]] = {}
    for mutant in mutants:
        places.setdefault(span(mutant, text), []).append(mutant)
    ordered = sorted(places)
    for one, other in itertools.pairwise(ordered):
        if other[0] < one[1]:
            raise ListError(f"{places[one][0].id} and {places[other][0].id} overlap")
    for begin, end in reversed(ordered):
        changed = text[begin:end]
        for mutant in places[begin, end]:
            changed = both(mutant, changed)
        text = text[:begin] + changed + text[end:]
    return text


def rewritten(project: Project) -> dict[str, str]:
    """All changed C++ files of the tree."""
    by_file: dict[str, list[Mutant]] = {}
    for mutant in project.mutants:
        if mutant.compiled:
            by_file.setdefault(mutant.file, []).append(mutant)
    changed = {
        file: rewrite((project.root / file).read_text(), mutants)
        for file, mutants in by_file.items()
    }
    preluded = set()
    for file in by_file:
        into = next((i for p, i in project.preludes.items() if Path(file).match(p)), file)
        preluded.add(into)
    for file in preluded:
        text = changed.get(file) or (project.root / file).read_text()
        changed[file] = f'#include "{project.tree / HEADER}"\n#line 1\n{text}'
    return changed


def missing_tests(project: Project) -> dict[str, list[str]]:
    """By an item of the lists the names in it of which there is no test."""
    sources = [path for pattern in project.cpp_sources for path in project.root.glob(pattern)]
    cpp = [
        name
        for path in sources
        for name in re.findall(r"^TEST\((\w+)\)", path.read_text(), re.MULTILINE)
    ]

    @functools.lru_cache
    def exists(test: str) -> bool:
        file, _, rest = test.partition("::")
        path = project.root / file
        function = rest.partition("[")[0]
        return path.exists() and (not function or f"def {function}(" in path.read_text())

    missing = {}
    for item in {test for m in project.mutants for test in (*m.tests, *m.room_tests)}:
        if item.startswith("cpp:"):
            parts = item.removeprefix("cpp:").split()
            missing[item] = [part for part in parts if not any(part in name for name in cpp)]
        else:
            missing[item] = [test for test in item.split(" -k ")[0].split() if not exists(test)]
    return missing


def check(project: Project) -> list[str]:
    """What is wrong with the list."""
    problems = []
    missing = missing_tests(project)
    for mutant in project.mutants:
        try:
            text = (project.root / mutant.file).read_text()
            span(mutant, text)
            if mutant.compiled:
                both(mutant, "")
                check_form(mutant, text)
            if mutant.old == mutant.new:
                raise ListError(f"{mutant.id}: it changes nothing")
            for test in (*mutant.tests, *mutant.room_tests):
                if missing[test]:
                    raise ListError(f"{mutant.id}: no test {' '.join(missing[test])}")
        except (ListError, OSError) as error:
            problems.append(str(error))
    if not problems:
        try:
            rewritten(project)
        except ListError as error:
            problems.append(str(error))
    return problems


# --- copies and the build ----------------------------------------------------------


def files_of(root: Path) -> list[str]:
    """What git tracks or would track; without git, as in an unpacked sdist, everything."""
    if not (root / ".git").exists():
        found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
        return [str(path) for path in found if not {"build", "__pycache__"} & set(path.parts)]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True).stdout
    return [name for name in listed.decode().split("\0") if name and (root / name).is_file()]


def put(path: Path, content: bytes, like: Path | None = None) -> None:
    """Writes a file unless that would change only its time, which would compile it again."""
    if path.exists() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if like is not None:
        path.chmod(like.stat().st_mode)


def copy_tree(project: Project, to: Path) -> None:
    changed = rewritten(project)
    names = files_of(project.root)
    for name in names:
        source = project.root / name
        content = changed[name].encode() if name in changed else source.read_bytes()
        put(to / name, content, source)
    put(project.tree / HEADER, CHOICE.encode())
    known = to / ".copied"
    before = set(known.read_text().split("\n")) if known.exists() else set()
    for name in before - set(names) - {""}:
        (to / name).unlink(missing_ok=True)
    known.write_text("\n".join(names))


def build(project: Project) -> None:
    """Copies the tree and builds it once, with all C++ mutants."""
    copy_tree(project, project.tree)
    project.build_folder.mkdir(parents=True, exist_ok=True)
    for command in project.build:
        print("+", *project.words(command), flush=True)
        subprocess.run(project.words(command), check=True)
    built = [mutant.digest for mutant in project.mutants if mutant.compiled]
    (project.work / "built").write_text(json.dumps(built))


def is_built(project: Project) -> bool:
    """Whether the build has all C++ mutants, as the list has them now."""
    built = project.work / "built"
    has = set(json.loads(built.read_text())) if built.exists() else set()
    return has.issuperset(mutant.digest for mutant in project.mutants if mutant.compiled)


@contextlib.contextmanager
def own_tree(project: Project) -> Iterator[Path]:
    """A copy of the tree that no other job uses, with what was built."""
    for k in range(64):
        tree = project.work / f"tree-{k}"
        project.work.mkdir(parents=True, exist_ok=True)
        with (project.work / f"tree-{k}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            copy_tree(project, tree)
            for name in project.install:
                for built in project.build_folder.glob(name):
                    copy = tree / built.relative_to(project.build_folder)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    if not copy.exists() or copy.stat().st_mtime_ns != built.stat().st_mtime_ns:
                        copy.unlink(missing_ok=True)
                        shutil.copy2(built, copy)
            yield tree
            return
    raise RuntimeError("64 jobs are running already")


@contextlib.contextmanager
def edited(mutant: Mutant | None, tree: Path) -> Iterator[None]:
    """The tree with a Python mutant in it."""
    if mutant is None or mutant.compiled:
        yield
        return
    path = tree / mutant.file
    text = path.read_text()
    begin, end = span(mutant, text)
    before = path.stat()
    # Compiled files are known by time and size of their source.
    path.write_text(text[:begin] + mutant.new + text[end:])
    os.utime(path, (before.st_atime, 1_000_000_000 + mutant.number % 500_000_000))
    try:
        yield
    finally:
        path.write_text(text)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# --- running tests -----------------------------------------------------------------


@dataclasses.dataclass
class Ended:
    """How a run of tests has ended."""

    failed: list[str]  # names of tests
    hangs: bool
    seconds: float
    output: str

    @property
    def passed(self) -> bool:
        return not self.failed and not self.hangs


def failed_cpp(project: Project, test: str, output: str, code: int) -> list[str]:
    failed = re.findall(r"^FAILED (\S+) \(", output, re.MULTILINE)
    if failed or code == 0:
        return failed
    # The process has ended in the middle of a test, which nobody has named.
    done = len(re.findall(r"^ok +\S+ \(", output, re.MULTILINE))
    return names_of(project, test)[done : done + 1] or [f"(ended with {code})"]


def names_of(project: Project, test: str) -> list[str]:
    """The tests of an item; of pytest's the item itself."""
    if not test.startswith("cpp:"):
        return [test]
    parts = test.removeprefix("cpp:").split()
    return [name for name in cpp_names(project) if any(part in name for part in parts)]


@functools.lru_cache
def cpp_names(project: Project) -> list[str]:
    command = [*project.words(project.cpp_tests), "--list"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def failed_pytest(output: str, code: int) -> list[str]:
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    # 5: nothing was collected, which is no catch but a wrong name.
    return failed or ([] if code == 0 else [f"(pytest ended with {code})"])


def end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def command_of(project: Project, test: str, only: list[str], all_of_them: bool) -> list[str]:
    """The command for an item of a mutant's list: "cpp:NAME...", or what pytest is given.

    Args:
        only: of its tests; none: all.
    """
    if test.startswith("cpp:"):
        return [*project.words(project.cpp_tests), *(only or test.removeprefix("cpp:").split())]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=0"]
    return [*command, *([] if all_of_them else ["-x"]), *(only or shlex.split(test))]


def run_test(
    project: Project,
    test: str,
    tree: Path,
    mutant: Mutant | None,
    limit: float,
    *,
    only: list[str] | None = None,
    all_of_them: bool = False,
) -> Ended:
    """Runs one item of a mutant's list."""
    command = command_of(project, test, only or [], all_of_them)
    settings = {k: v.format(**project.places(tree)) for k, v in project.env.items()}
    env = {**os.environ, **settings, "PYTHONPATH": str(tree)}
    env.pop(VARIABLE, None)
    if mutant is not None and mutant.compiled:
        env[VARIABLE] = str(mutant.number)
    begun = time.monotonic()
    with edited(mutant, tree):
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        hangs = False
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            hangs = True
            end_group(process)
            output, _ = process.communicate()
        except BaseException:
            end_group(process)
            raise
        finally:
            end_group(process)  # what it has left behind
    took = time.monotonic() - begun
    code = process.returncode
    if hangs:
        failed = []
    elif test.startswith("cpp:"):
        failed = failed_cpp(project, test, output, code)
    else:
        failed = failed_pytest(output, code)
    return Ended(failed, hangs, took, output)


class Results:
    """What is known so far: a file for each mutant, and for each item how long it takes.

    Args:
        saved: what an earlier report has written, perhaps elsewhere.
    """

    def __init__(self, work: Path, saved: Path | None = None) -> None:
        self.folder = work / "results"
        self.folder.mkdir(parents=True, exist_ok=True)
        data = json.loads(saved.read_text()) if saved is not None and saved.exists() else {}
        # Each mutant has the day of its own run, as a report also has results of earlier ones.
        date = {"date": data.get("date")}
        self.saved = {entry["id"]: date | entry for entry in data.get("mutants", [])}
        self.ran: list[str] = data.get("ran", [])

    def path(self, name: str) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)}.json"

    def get(self, name: str) -> dict[str, Any] | None:
        try:
            return json.loads(self.path(name).read_text())  # type: ignore[no-any-return]
        except (OSError, json.JSONDecodeError):
            return self.saved.get(name)

    def is_newer(self, name: str, than: Path) -> bool:
        path = self.path(name)
        return path.exists() and path.stat().st_mtime >= than.stat().st_mtime

    def put(self, name: str, value: dict[str, Any]) -> None:
        part = self.path(name).with_suffix(f".{threading.get_ident()}.tmp")
        part.write_text(json.dumps(value, indent=1) + "\n")
        part.replace(self.path(name))

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Whether no other job works on it."""
        with self.path(name).with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


def usual(test: str) -> str:
    """Where it is kept how long a test takes."""
    return "usual-" + hashlib.sha256(test.encode()).hexdigest()[:16]


class Runner:
    """One job: its own copy of the tree."""

    def __init__(
        self, project: Project, results: Results, tree: Path, all_killers: bool, only: str | None
    ) -> None:
        self.project = project
        self.results = results
        self.tree = tree
        self.all_killers = all_killers
        self.only = only

    def test(self, test: str, mutant: Mutant | None, limit: float) -> Ended:
        return run_test(self.project, test, self.tree, mutant, limit, all_of_them=self.all_killers)

    def confirmed(self, test: str, mutant: Mutant, ended: Ended, limit: float) -> bool:
        """Whether tests that have failed pass without the mutant, and fail again with it."""
        named = [name for name in ended.failed if not name.startswith("(")]
        run = functools.partial(run_test, self.project, test, self.tree, limit=limit, only=named)
        if not run(mutant=None).passed:
            return False
        # A busy machine fails a test once; a race is not seen each time.
        return ended.hangs or any(not run(mutant=mutant).passed for _ in range(3))

    def limit(self, test: str) -> float:
        """Seconds after which an item hangs, by how long it has taken at most so far."""
        known = self.results.get(usual(test))
        kind = "C++" if test.startswith("cpp:") else "Python"
        return max(LEAST_LIMIT, SLOWER * known["seconds"]) if known else FIRST_LIMIT[kind]

    def passed_in(self, test: str, seconds: float) -> None:
        known = self.results.get(usual(test))
        if known is None or seconds > known["seconds"]:
            self.results.put(usual(test), {"test": test, "seconds": round(seconds, 1)})

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Its own tests before those of its room, and C++ before Python, which takes longer."""
        wider = () if self.only == "named" else mutant.room_tests
        tests = dict.fromkeys((*mutant.tests, *wider))
        compiled = [test for test in tests if test.startswith("cpp:")]
        if self.only == "cpp":
            return compiled
        return [*compiled, *(test for test in tests if not test.startswith("cpp:"))]

    def mutant(self, mutant: Mutant, passed: Iterable[str] = ()) -> dict[str, Any]:
        """The tests most likely to notice it, then those of its room, until one does.

        Args:
            passed: that have passed with it already.
        """
        result: dict[str, Any] = {
            "id": mutant.id,
            "digest": mutant.digest,
            "room": mutant.room,
            "caught": False,
            "hang": False,
            "by": [],
            "ran": list(passed),
            "whole": self.only is None,
            "all_killers": self.all_killers,
            "date": datetime.date.today().isoformat(),
        }
        begun = time.monotonic()
        for test in self.tests_of(mutant):
            if test in result["ran"]:
                continue
            limit = self.limit(test)
            ended = self.test(test, mutant, limit)
            if ended.hangs:  # or the machine was busy
                limit *= 2
                ended = self.test(test, mutant, limit)
            result["ran"].append(test)
            if ended.passed:
                self.passed_in(test, ended.seconds)
                continue
            if not self.confirmed(test, mutant, ended, limit):
                print(f"  {test} fails by itself, not by {mutant.id}", flush=True)
                continue
            result["caught"] = True
            result["hang"] = result["hang"] or ended.hangs
            killers = ended.failed or [test]  # an item may be part of another
            result["by"] += [killer for killer in killers if killer not in result["by"]]
            self.results.path(mutant.id).with_suffix(".txt").write_text(ended.output[-20000:])
            if not self.all_killers:
                break
        result["seconds"] = round(time.monotonic() - begun, 1)
        return result


def decided(result: dict[str, Any]) -> bool:
    """Whether all tests have run, or one has caught it; --only leaves tests out."""
    return bool(result["caught"] or result["whole"])


def wanted(project: Project, names: list[str]) -> list[Mutant]:
    chosen = [m for m in project.mutants if not m.equivalent]
    if names:
        chosen = [m for m in chosen if any(n in m.id or n in m.file or n == m.room for n in names)]
    return chosen


def run(
    project: Project,
    names: list[str],
    *,
    jobs: int = 1,
    again: bool = False,
    survivors: bool = False,
    all_killers: bool = False,
    only: str | None = None,
    minutes: float = 1e9,
) -> bool:
    """Runs mutants that have no result yet."""
    if not is_built(project):
        raise ListError("the list of C++ mutants has changed: python tools/mutants.py build")
    built = project.work / "built"
    results = Results(project.work, project.saved)
    end = time.monotonic() + 60 * minutes
    mutants = wanted(project, names)
    waiting = iter(mutants)
    turn = threading.Lock()
    failures: list[BaseException] = []

    def job() -> None:
        try:
            with own_tree(project) as tree:
                runner = Runner(project, results, tree, all_killers, only)
                while time.monotonic() < end and not failures:
                    with turn:
                        mutant = next(waiting, None)
                    if mutant is None:
                        return
                    one(runner, mutant)
        except BaseException as error:
            failures.append(error)

    def one(runner: Runner, mutant: Mutant) -> None:
        known = results.get(mutant.id)
        if again or known is None or known["digest"] != mutant.digest:
            known = None
        elif all_killers and known["caught"] and not known.get("all_killers"):
            known = None  # the first killer only
        elif decided(known):
            if known["caught"] or not survivors:
                return
            known = None
        elif not results.is_newer(mutant.id, built):
            known = None  # there may be other tests now
        with results.claim(mutant.id) as mine:
            if not mine:
                return
            result = runner.mutant(mutant, known["ran"] if known else ())
            results.put(mutant.id, result)
        how = "hang in" if result["hang"] else "caught by"
        said = (
            f"{how} {result['by'][0]}"
            if result["caught"]
            else "SURVIVED"
            if decided(result)
            else "not caught yet"
        )
        print(f"{mutant.id}: {said} ({result['seconds']:.0f} s)", flush=True)

    threads = [threading.Thread(target=job) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt as interrupt:
        failures.append(interrupt)  # no job begins another mutant
    if failures:
        raise failures[0]
    done = [results.get(m.id) for m in mutants]
    return all(r is not None and r["caught"] for r in done)


# --- the table -----------------------------------------------------------------------


def report(project: Project) -> tuple[str, dict[str, Any]]:
    """Markdown, and the results as data."""
    results = Results(project.work, project.saved)
    rows, catches = [], {}
    kept = []
    counts: dict[str, list[int]] = {}
    missing = []
    for mutant in project.mutants:
        count = counts.setdefault(mutant.room, [0, 0, 0, 0])  # all, equivalent, run, caught
        count[0] += 1
        if mutant.equivalent:
            count[1] += 1
            rows.append((mutant, "equivalent", mutant.equivalent, ""))
            continue
        known = results.get(mutant.id)
        if known is None or known["digest"] != mutant.digest:
            missing.append(mutant.id)
            rows.append((mutant, "not run", "", ""))
            continue
        count[2] += 1
        count[3] += known["caught"]
        kept.append({"file": mutant.file, **known})
        how = "not caught yet"
        if decided(known):
            how = "survived" if not known["caught"] else "hang" if known["hang"] else "caught"
        rows.append(
            (mutant, how, ", ".join(f"`{t}`" for t in known["by"][:2]), f"{known['seconds']:.0f}")
        )
        for test in known["by"]:
            catches.setdefault(test, []).append((mutant.id, len(known["by"])))
    ran = set(results.ran)
    for mutant in project.mutants:
        known = results.get(mutant.id)
        if known is not None:
            ran.update(known["ran"])
    alone = {
        test: [mutant for mutant, number in caught if number == 1]
        for test, caught in catches.items()
        if any(number == 1 for _, number in caught)
    }
    names = {name for test in ran for name in names_of(project, test)}
    quiet = sorted(name for name in names if not any(is_one_of(by, name) for by in alone))
    total = [sum(c[i] for c in counts.values()) for i in range(4)]
    share = 100 * total[3] / max(total[2], 1)
    lines = [
        "# What the tests notice",
        "",
        "`make mutants` wrote this. A mutant is one deliberate fault "
        "([CONTRIBUTING.md](../../CONTRIBUTING.md#mutants)).",
        "",
        f"{datetime.date.today().isoformat()}: {total[3]} of {total[2]} mutants that were run are "
        f"caught ({share:.0f} %); {total[1]} are equivalent"
        + (f", {len(missing)} have not been run." if missing else "."),
        "",
        "| room | mutants | equivalent | run | caught | % |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for room, (every, same, run, caught) in counts.items():
        percent = f"{100 * caught / run:.0f}" if run else ""
        lines.append(f"| {room} | {every} | {same} | {run} | {caught} | {percent} |")
    lines += ["", "| mutant | room | result | by | s |", "|---|---|---|---|---:|"]
    lines += [f"| {m.id} | {m.room} | {how} | {by} | {s} |" for m, how, by, s in rows]
    whole = sum(known["caught"] and known.get("all_killers", False) for known in kept)
    lines += [
        "",
        "## Tests by what only they catch",
        "",
        f"Of {whole} of the {total[3]} mutants that are caught all killers are known; another's "
        "run has ended with the first (`--all-killers` goes on), which stands here.",
        "",
        "| test | mutants that only it catches |",
        "|---|---|",
        *[f"| `{test}` | {', '.join(alone[test])} |" for test in sorted(alone)],
        "",
        "## Tests that were run and were never the only one to catch a mutant",
        "",
        "Candidates to go, if they check nothing else. A test that comes late in the lists has had "
        "few chances where the first catch has ended the run.",
        "",
        *[f"- `{test}`" for test in quiet],
    ]
    data = {"date": datetime.date.today().isoformat(), "mutants": kept, "ran": sorted(ran)}
    return "\n".join(lines) + "\n", data


def lines_of(data: dict[str, Any]) -> str:
    """JSON with a line for each mutant."""
    mutants = ",\n".join(json.dumps(mutant) for mutant in data["mutants"])
    date, ran = (json.dumps(data[key]) for key in ("date", "ran"))
    return f'{{"date": {date},\n"ran": {ran},\n"mutants": [\n{mutants}\n]}}\n'


def is_one_of(by: str, name: str) -> bool:
    """Whether a test that has failed is the C++ test of this name, or of this item of pytest's."""
    return by == name or any(by.startswith(part) for part in name.split(" -k ")[0].split())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--work", type=Path, help="copies, build and results (build/mutants)")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    commands.add_parser("build")
    runs = commands.add_parser("run")
    runs.add_argument("names", nargs="*")
    runs.add_argument("-j", "--jobs", type=int, default=1)
    runs.add_argument("--again", action="store_true", help="also what has a result")
    runs.add_argument("--survivors", action="store_true", help="also what has survived")
    runs.add_argument(
        "--all-killers",
        action="store_true",
        help="go on after the first catch; also what has only its first killer",
    )
    runs.add_argument(
        "--only",
        choices=("cpp", "named"),
        help="C++ tests, or those that mutants name; the others run with the next call",
    )
    runs.add_argument("--minutes", type=float, default=1e9, help="begin no mutant after these")
    writes = commands.add_parser("report")
    writes.add_argument("--to", type=Path, help="without a suffix (tools/mutants/results)")
    args = parser.parse_args(arguments)
    project = load(args.root, args.work and args.work.resolve())
    problems = check(project)
    for problem in problems:
        print(problem, file=sys.stderr)
    if args.command == "check" or problems:
        print(f"{len(project.mutants)} mutants, {len(problems)} of them do not fit")
        return 1 if problems else 0
    if args.command == "build":
        build(project)
        return 0
    if args.command == "run":
        keys = ("jobs", "again", "survivors", "all_killers", "only", "minutes")
        options = {key: getattr(args, key) for key in keys}
        return 0 if run(project, args.names, **options) else 1
    text, data = report(project)
    to = args.to or args.root / "tools/mutants/results"
    to.with_suffix(".md").write_text(text)
    to.with_suffix(".json").write_text(lines_of(data))
    print(text[: text.index("| mutant |")])
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ListError as problem:
        sys.exit(str(problem))
