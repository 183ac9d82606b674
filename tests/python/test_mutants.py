"""tools/mutants.py on a project of two files; and its list fits the sources."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from harness import ROOT, tool

PROJECT = """
[build]
commands = [["c++", "-O1", "-o", "{build}/tests", "{tree}/csrc/add.cpp"]]
cpp_tests = ["{build}/tests"]
cpp_sources = ["csrc/*.cpp"]

[[room]]
name = "C++"
paths = ["csrc/"]
tests = ["cpp:add"]

[[room]]
name = "Python"
paths = ["package/"]
tests = ["tests/test_calc.py", "tests/test_broken.py"]
"""
SOURCE = """
#include <cstdio>
#include <cstring>
int add(int a, int b) {
  int sum = a;
  while (a < 0) { ++a; }
  sum += b;
  return sum;
}
/* As in tests/cpp:
TEST(add)
*/
int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
    std::puts("add");
    return 0;
  }
  const bool ok = add(2, 2) == 4;
  std::printf("%s add (0 ms)\\n", ok ? "ok    " : "FAILED");
  return ok ? 0 : 1;
}
"""
MUTANTS = """
[[mutant]]
id = "caught"
file = "csrc/add.cpp"
old = "sum += b;"
new = "sum -= b;"

[[mutant]]
id = "hangs"
file = "csrc/add.cpp"
old = "a < 0"
new = "a < 9 || (a = 0) == 0"

[[mutant]]
id = "survives"
file = "csrc/add.cpp"
old = "sum += b;"
new = "sum *= b;"

[[mutant]]
id = "python"
file = "package/calc.py"
at = "return a * b"
old = "a * b"
new = "a + b"
tests = ["tests/test_calc.py -k product"]

[[mutant]]
id = "same"
file = "package/calc.py"
old = "a * b"
new = "b * a"
equivalent = "products commute"
"""
TEST = """
from package.calc import product

def test_product():
    assert product(2, 3) == 6
"""


def test_list_fits() -> None:
    mutants = tool("mutants")
    assert mutants.check(mutants.load(ROOT)) == []


@pytest.fixture
def root(tmp_path: Path) -> Path:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    files = {
        "tools/mutants/project.toml": PROJECT,
        "tools/mutants/all.toml": MUTANTS,
        "csrc/add.cpp": SOURCE,
        "package/__init__.py": "",
        "package/calc.py": "def product(a, b):\n    return a * b\n",
        "tests/test_calc.py": TEST,
        "tests/test_broken.py": "def test_broken():\n    assert False\n",
    }
    for name, text in files.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "project"


@pytest.mark.long
def test_catches(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutants = tool("mutants")
    monkeypatch.setattr(mutants, "FIRST_LIMIT", {"C++": 5.0, "Python": 60.0})
    project = mutants.load(root, tmp_path / "work")
    mutants.build(project)
    assert not mutants.run(project, [], only="cpp")
    begun = mutants.Results(project.work).get("survives")
    assert begun["ran"] == ["cpp:add"] and not mutants.decided(begun)
    assert not mutants.run(project, [], jobs=2)  # one survives
    found = {m.id: mutants.Results(project.work).get(m.id) for m in project.mutants}
    assert found.pop("same") is None
    assert {name: one["caught"] for name, one in found.items()} == {
        "caught": True,
        "hangs": True,
        "survives": False,
        "python": True,
    }
    assert [name for name, one in found.items() if one["hang"]] == ["hangs"]
    assert found["caught"]["by"] == ["add"]
    assert found["python"]["by"] == ["tests/test_calc.py::test_product"]
    # Nothing runs again, and a test that fails anyway catches nothing.
    before = dict(found)
    mutants.run(project, [])
    assert {name: mutants.Results(project.work).get(name) for name in before} == before
    (root / "tests/test_again.py").write_text(TEST)
    settings = root / "tools/mutants/project.toml"
    settings.write_text(PROJECT.replace('calc.py", ', 'calc.py", "tests/test_again.py", '))
    project = mutants.load(root, tmp_path / "work")
    mutants.run(project, ["python"], all_killers=True)
    python = mutants.Results(project.work).get("python")
    product = [f"tests/test_{name}.py::test_product" for name in ("calc", "again")]
    assert python["all_killers"] and python["by"] == product
    text, data = mutants.report(project)
    assert "| `add` | caught |" in text and "Of 1 of the 3 mutants" in text
    assert "3 of 4 mutants that were run are caught (75 %); 1 are equivalent." in text
    assert {one["id"]: one["caught"] for one in data["mutants"]} == {
        "caught": True,
        "hangs": True,
        "survives": False,
        "python": True,
    }
    # A fresh clone knows what was saved, and goes on from there.
    (root / "tools/mutants/results.json").write_text(mutants.lines_of(data))
    elsewhere = mutants.load(root, tmp_path / "elsewhere")
    assert mutants.Results(elsewhere.work, elsewhere.saved).get("survives") is not None
    monkeypatch.setattr(mutants, "cpp_names", lambda _: ["add"])
    again, _ = mutants.report(elsewhere)
    assert again == text


@pytest.mark.parametrize("hangs", [1, 2])
def test_hang_is_seen_twice(
    hangs: int, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once may be a busy machine."""
    mutants = tool("mutants")
    limits: list[float] = []

    def run_test(project: Any, test: str, tree: Path, mutant: Any, limit: float, **_: Any) -> Any:
        if mutant is None:
            return mutants.Ended([], False, 1.0, "")
        limits.append(limit)
        return mutants.Ended([], len(limits) <= hangs, 1.0, "")

    monkeypatch.setattr(mutants, "run_test", run_test)
    project = mutants.load(root, tmp_path / "work")
    runner = mutants.Runner(project, mutants.Results(project.work), root, False, None)
    found = runner.mutant(project.mutants[0])
    assert (found["caught"], found["hang"]) == (hangs == 2, hangs == 2)
    assert limits[1] == 2 * limits[0]


def test_text_that_has_gone(root: Path, tmp_path: Path) -> None:
    mutants = tool("mutants")
    (root / "csrc/add.cpp").write_text(SOURCE.replace("sum += b", "sum += 1 * b"))
    problems = mutants.check(mutants.load(root, tmp_path / "work"))
    assert [problem.split(":")[0] for problem in problems] == ["caught", "survives"]
    assert "has gone from csrc/add.cpp" in problems[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("while (a < 0) {", "while (a < 9) {"),  # half a block
        ("+= b;", "-= b;"),  # half a statement
        ("int sum = a;", "int sum = b; // not a"),
        ("int sum =", "int sum -="),
        ("int argc, char** argv", "int argc, char* argv"),
    ],
)
def test_text_that_does_not_compile(root: Path, tmp_path: Path, old: str, new: str) -> None:
    mutant = f'[[mutant]]\nid = "cut"\nfile = "csrc/add.cpp"\nold = "{old}"\nnew = "{new}"\n'
    (root / "tools/mutants/all.toml").write_text(mutant)
    (problem,) = tool("mutants").check(tool("mutants").load(root, tmp_path / "work"))
    assert problem.startswith("cut: ")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('["cpp:add"]', '["cpp:add subtract"]'),
        ("tests/test_broken.py", "tests/test_gone.py"),
        ("tests/test_broken.py", "tests/test_broken.py::test_gone[1]"),
    ],
)
def test_tests_that_have_gone(root: Path, tmp_path: Path, old: str, new: str) -> None:
    mutants = tool("mutants")
    settings = root / "tools/mutants/project.toml"
    settings.write_text(settings.read_text().replace(old, new))
    problems = mutants.check(mutants.load(root, tmp_path / "work"))
    assert problems and all("no test" in problem for problem in problems)


def test_build_that_is_out_of_date(root: Path, tmp_path: Path) -> None:
    mutants = tool("mutants")
    project = mutants.load(root, tmp_path / "work")
    mutants.build(project)
    (root / "tools/mutants/all.toml").write_text(MUTANTS.replace("sum -= b", "sum -= 2 * b"))
    with pytest.raises(mutants.ListError, match=r"mutants\.py build"):
        mutants.run(mutants.load(root, tmp_path / "work"), [])
