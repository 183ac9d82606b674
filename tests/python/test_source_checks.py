"""What `make lint` checks by tools of our own: it finds what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import ROOT, tool

FIRST = """#include "net/a.hpp"
namespace fusedpg {
namespace {
using Alias = int;
constexpr size_t kPage = 4096;
std::vector<int> list{1};
struct Row {
  int count(int p);
};
template <typename T>
const T* address_of(
    const T& t) {
  return &t;
}
} // namespace
int seen_by_all(int);
} // namespace fusedpg
"""


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("constexpr int kPage{1};", "kPage"),
        ("int list[3];", "list"),
        ("class Row {\n};", "Row"),
        ("void address_of(int a);", "address_of"),
        ("using Alias = int;", None),
        ("void count(int p);", None),  # a member there
        ("int seen_by_all(int);", None),  # not private there
        ("struct Other;", None),
    ],
)
def test_names_that_files_share(line: str, name: str | None, tmp_path: Path) -> None:
    def found(space: str, folder: str = "net") -> list[str]:
        path = tmp_path / folder / "b.cpp"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f"namespace {space} {{\nnamespace {{\n{line}\n"
            f"}} // namespace\n}} // namespace {space}\n"
        )
        return [str(error) for error in tool("check_names").name_errors(tmp_path)]

    tmp_path.joinpath("net").mkdir()
    tmp_path.joinpath("net", "a.cpp").write_text(FIRST)
    errors = found("fusedpg")
    assert [f"a.cpp has a fusedpg::{name} of its own" in error for error in errors] == [
        True
    ] * bool(name)
    assert found("fusedpg::other") == []


@pytest.mark.parametrize(
    ("room", "text", "wrong"),
    [
        ("base", '#include "net/a.hpp"', True),
        ("c10d", '#include "net/a.hpp"', False),
        ("net", "#include <torch/library.h>", True),
        ("net", '#include "a.hpp"', True),
        ("cellar", "", True),
    ],
)
def test_rooms_that_may_not_be_seen(room: str, text: str, wrong: bool, tmp_path: Path) -> None:
    for folder in {"net", room}:
        tmp_path.joinpath(folder).mkdir()
    tmp_path.joinpath("net", "a.hpp").write_text("")
    tmp_path.joinpath(room, "b.cpp").write_text(text + "\n")
    assert bool(tool("check_layers").layer_errors(tmp_path)) == wrong


def test_of_this_tree() -> None:
    assert tool("check_names").name_errors(ROOT / "csrc") == []
    assert tool("check_layers").layer_errors(ROOT / "csrc") == []


def test_page_of_what_is_tested_is_up_to_date() -> None:
    assert tool("tested").main(["--check"]) == 0, "run: python tools/tested.py"
