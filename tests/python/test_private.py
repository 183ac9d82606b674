"""Directories of the cache, and who else could change them: with two users, one of whom attacks."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusedpg.fusion import compile as compiling
from fusedpg.fusion import tune
from fusedpg.fusion.errors import FusionError
from fusedpg.fusion.private import content, directory

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs two users: run it as root")
VICTIM, ATTACKER = 65533, 65534


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory that other users can enter, as they cannot pytest's own."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = root / "a" / "b"
    monkeypatch.setenv("FUSEDPG_CACHE_DIR", str(place))
    return place


def as_user(user: int, call: Callable[[], object]) -> str:
    """What a process of another user gets: the name of an exception, or nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        said = ""
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            call()
        except BaseException as error:
            said = type(error).__name__
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return said


def given(path: Path, mode: int, owner: int = 0) -> Path:
    path.mkdir()
    path.chmod(mode)
    os.chown(path, owner, owner)
    return path


def of_attacker(root: Path) -> None:
    given(root / "a", 0o755, ATTACKER)


def of_all(root: Path) -> None:
    given(root / "a", 0o777)


def of_a_group(root: Path) -> None:
    given(root / "a", 0o775)


def sticky_of_attacker(root: Path) -> None:
    given(root / "a", 0o1777, ATTACKER)


def last_of_all(root: Path) -> None:
    given(given(root / "a", 0o755) / "b", 0o755)
    for name in ("fusion", "tuned"):
        given(root / "a" / "b" / name, 0o1777)


def link_of_attacker(root: Path) -> None:
    given(root / "a", 0o1777)
    given(root / "safe", 0o755)
    link = root / "a" / "b"
    assert not as_user(ATTACKER, lambda: link.symlink_to(root / "safe"))


def link_among_others(root: Path) -> None:
    given(root / "safe", 0o755)
    (given(root / "a", 0o1777) / "b").symlink_to(root / "safe")


def link_to_attacker(root: Path) -> None:
    given(given(root / "theirs", 0o755, ATTACKER) / "mine", 0o755)
    (given(root / "a", 0o755) / "b").symlink_to("../theirs/mine")


@as_root
@pytest.mark.parametrize(
    "arranged",
    [
        of_attacker,
        of_all,
        of_a_group,
        sticky_of_attacker,
        last_of_all,
        link_of_attacker,
        link_among_others,
        link_to_attacker,
    ],
)
def test_refused(
    arranged: Callable[[Path], None], root: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arranged(root)
    before = sorted(map(str, root.rglob("*")))
    for name in ("fusion", "tuned"):
        with pytest.raises(FusionError, match=r"chmod go-w"), directory(str(cache), name):
            pass
    compiling._functions.clear()
    text = 'extern "C" void fusedpg_epilogue_2(const void*, unsigned long, unsigned long) {}\n'
    assert compiling.function(text, "program") == 0
    assert "operation by operation" in caplog.text and str(root) in caplog.text
    assert sorted(map(str, root.rglob("*"))) == before
    compiling._functions.clear()


@as_root
@pytest.mark.parametrize("above", [0o755, 0o1777, 0o1775])
def test_nobody_else_can_change_it(above: int, root: Path, cache: Path) -> None:
    given(root / "a", above)
    with directory(str(cache), "fusion") as place:
        (place / "x.so").write_bytes(b"mine")

        def attacks() -> Iterator[Callable[[], object]]:
            # Not shutil.move, which copies what it cannot rename, and a copy changes nothing here.
            for path in (root, root / "a", cache, cache / "fusion", cache / "fusion" / "x.so"):
                yield lambda path=path: path.rename(path.with_name("gone"))  # type: ignore[misc]
                yield lambda path=path: path.chmod(0o777)  # type: ignore[misc]
            yield lambda: (cache / "fusion" / "y.so").write_bytes(b"theirs")
            yield lambda: (cache / "fusion" / "x.so").write_bytes(b"theirs")
            yield lambda: (cache / "new").mkdir()

        for attack in attacks():
            assert as_user(ATTACKER, attack) in ("PermissionError", "FileNotFoundError")
        assert content(place / "x.so") == b"mine"


@as_root
def test_of_a_user_below_a_common_directory(root: Path, cache: Path) -> None:
    given(root / "a", 0o1777)

    def use() -> None:
        with directory(str(cache), "fusion") as place:
            (place / "x").write_text("mine")

    assert as_user(VICTIM, use) == ""
    assert (cache / "fusion" / "x").stat().st_uid == VICTIM
    # Neither another user nor root, who has nothing to gain there, takes it.
    assert as_user(ATTACKER, use) == "FusionError"
    with pytest.raises(FusionError, match="belongs to another user"):
        use()
    # Who comes first has it: another user is told.
    shutil.rmtree(cache)
    assert as_user(ATTACKER, use) == ""
    assert as_user(VICTIM, use) == "FusionError"


@pytest.mark.parametrize("mask", [0, 0o002, 0o077])
def test_levels_are_the_users_alone(mask: int, root: Path, cache: Path) -> None:
    old = os.umask(mask)
    try:
        with directory(str(cache), "fusion") as place:
            (place / "x").write_text("mine")
    finally:
        os.umask(old)
    for path in (root / "a", cache, cache / "fusion"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    with directory(str(cache), "fusion") as place:
        # In a directory that others can enter, one of these could be changed by them.
        found = content(place / "x")
        assert found == (None if mask in (0, 0o002) else b"mine")


def test_what_is_renamed_meanwhile(root: Path, cache: Path) -> None:
    with directory(str(cache), "fusion") as place:
        (place / "x").write_text("checked")
        (root / "a").rename(root / "old")
        cache.joinpath("fusion").mkdir(parents=True)
        cache.joinpath("fusion", "x").write_text("swapped")
        assert content(place / "x") == b"checked"
        (place / "y").write_text("1")
    assert (root / "old" / "b" / "fusion" / "y").exists()


def test_links(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    (root / "far").mkdir()
    (root / "away").symlink_to(root / "far" / "." / ".." / "far")
    (root / "again").symlink_to("away/../away")
    for path in ("again", "./away/", f"{root}//again", "far/../again"):
        with directory(path, "fusion") as place:
            assert place.resolve() == root / "far" / "fusion"
    (root / "loop").symlink_to("loop")
    with pytest.raises(FusionError, match="symbolic links"), directory("loop", "fusion"):
        pass
    (root / "file").write_text("")
    with pytest.raises(NotADirectoryError), directory("file", "fusion"):
        pass
    open_before = len(os.listdir("/proc/self/fd"))
    for path in ("again", "loop", "file", "away"):
        with contextlib.suppress(FusionError, OSError), directory(path, "x"):
            pass
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_library_is_its_sources(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A whole file under the name of another one is not called."""
    texts = [
        f'extern "C" void fusedpg_epilogue_2(const void*, unsigned long, unsigned long) {{ {x} }}\n'
        for x in ("", "volatile int one = 1; (void)one;")
    ]
    compiling._functions.clear()
    addresses = [compiling.function(text, "program") for text in texts]
    assert all(addresses) and addresses[0] != addresses[1]
    first, second = sorted(cache.glob("fusion/*.so"))
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    made = first.read_bytes(), second.read_bytes()
    first.write_bytes(made[1])
    second.write_bytes(made[0])
    call = (
        "from fusedpg.fusion.compile import function\n"
        f"assert not any([function(text, 'program') for text in {texts!r}])"
    )
    subprocess.run([sys.executable, "-c", call], check=True, timeout=120)
    compiling._functions.clear()


def test_temporary_files(cache: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's are in the cache, and gone when it ends."""
    script = root / "c++"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec c++ --version\n'
        f'echo "$TMPDIR $(pwd -P)" >> {root}/said\nexec c++ "$@"\n'
    )
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    compiling._functions.clear()
    text = 'extern "C" void fusedpg_epilogue_2(const void*, unsigned long, unsigned long) {}\n'
    assert compiling.function(text, "program")
    said, place = (root / "said").read_text().split()
    assert said == "." and Path(place).parent == cache / "fusion"
    assert {path.suffix for path in (cache / "fusion").iterdir()} == {".so", ".cpp", ".lock"}
    compiling._functions.clear()


@as_root
def test_choices_of_the_tuner(root: Path, cache: Path) -> None:
    of_attacker(root)
    with pytest.raises(FusionError), tune._directory():
        pass
