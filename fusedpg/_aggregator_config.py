"""Configuration files of ``fusedpg-aggregator``: TOML, or those of OmniReduce and SwitchML."""

from __future__ import annotations

import socket
from pathlib import Path
from types import ModuleType

# Keys of omnireduce.cfg that say nothing to a process that only adds up what comes.
_OMNIREDUCE_OTHERS = {
    "num_threads", "worker_cores", "aggregator_cores", "threshold", "buffer_size", "chunk_size",
    "bitmap_chunk_size", "message_size", "block_size", "ib_hca", "ib_port", "gid_idx", "sl",
    "gpu_devid", "direct_memory", "adaptive_blocksize",
}  # fmt: skip
_OMNIREDUCE = {"num_workers", "num_aggregators", "tcp_port", "worker_ips", "aggregator_ips"}
_OMNIREDUCE_PORT = 19875


def read(path: str, *, listens: bool) -> tuple[dict[str, object], list[str]]:
    """What a file says, by the names of ``aggregator.Settings``; and which of its keys mean nothing
    here.

    A file that ends with ``.cfg`` is omnireduce.cfg if it has the section ``[omnireduce]``, else
    switchml.cfg; any other one is TOML.

    Args:
        listens: whether it must say where to listen, if it can; else that is known otherwise.

    Raises:
        ValueError: it cannot be read, or a key or value cannot be.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    if not path.endswith(".cfg"):
        return _toml(path, text), []
    from fusedpg.aggregation import _config as switchml  # with torch, which nothing else here needs

    values = switchml.read_sections(text, path)
    if any(key.startswith("omnireduce.") for key in values):
        return _omnireduce(path, values, listens)
    return _switchml(switchml, path, values)


def _toml(path: str, text: str) -> dict[str, object]:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        raise ValueError(f"{path}: a TOML file takes Python 3.11 or newer") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    known = {"listen", "key", "key_file", "stats", "udp"}
    unknown = sorted(set(table) - known)
    if unknown:
        raise ValueError(f"{path}: unknown {', '.join(unknown)}; there are {sorted(known)}")
    for name in ("listen", "key", "udp", "key_file"):
        if not isinstance(table.get(name, ""), str):
            raise ValueError(f"{path}: {name} is a text, got {table[name]!r}")
    if "key_file" in table:
        if "key" in table:
            raise ValueError(f"{path}: key and key_file are the same: give one of them")
        place = Path(path).parent / table.pop("key_file")
        try:
            table["key"] = place.read_text().strip()
        except OSError as error:
            raise ValueError(f"{place}: {error.strerror}") from None
    return table


def _number(path: str, key: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{path}: {key} is a number, got {text!r}")
    return int(text)


def _omnireduce(
    path: str, values: dict[str, str], listens: bool
) -> tuple[dict[str, object], list[str]]:
    """``listen``: that one of ``aggregator_ips`` that is this host's, and ``tcp_port``."""
    found, others = {}, []
    for key, text in values.items():
        name = key.removeprefix("omnireduce.")
        if name in _OMNIREDUCE and name != key:
            found[name] = text
        elif name in _OMNIREDUCE_OTHERS and name != key:
            others.append(name)
        else:
            known = sorted(_OMNIREDUCE | _OMNIREDUCE_OTHERS)
            raise ValueError(f"{path}: unknown key {key}; there are {known}")
    port = _number(path, "tcp_port", found.get("tcp_port", str(_OMNIREDUCE_PORT)))
    addresses = {}
    for who in ("worker", "aggregator"):
        text = found.get(f"{who}_ips", "")
        addresses[who] = [one.strip() for one in text.split(",") if one.strip()]
        number = found.get(f"num_{who}s")
        if number is not None and text:
            wanted = _number(path, f"num_{who}s", number)
            if wanted != len(addresses[who]):
                raise ValueError(
                    f"{path}: num_{who}s is {wanted}, but {who}_ips has {len(addresses[who])}"
                )
    if "tcp_port" in found and not addresses["aggregator"] and listens:
        raise ValueError(f"{path}: tcp_port without aggregator_ips: give --listen, too")
    if not addresses["aggregator"] or not listens:
        return {}, others
    here = [one for one in addresses["aggregator"] if _is_here(one)]
    # A host may be named once for each of its aggregators.
    if len(set(here)) != 1:
        some = "none" if not here else "more than one"
        raise ValueError(
            f"{path}: {some} of aggregator_ips is an address of this host: give --listen, too"
        )
    host = f"[{here[0]}]" if ":" in here[0] else here[0]
    return {"listen": f"{host}:{port}"}, others


def _is_here(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as one:
        try:
            one.bind((address, 0))
        except (OSError, TypeError, UnicodeError):  # the latter: a name that cannot be
            return False
    return True


def _switchml(
    switchml: ModuleType, path: str, values: dict[str, str]
) -> tuple[dict[str, object], list[str]]:
    """``udp``: the controller's address, where workers join."""
    controller = switchml.controller(values)
    others = []
    for key in values:
        switchml.parameter(key, path)  # raises for one that there is not
        if key not in switchml.CONTROLLER:
            others.append(key)
    return ({} if controller is None else {"udp": controller}), others
