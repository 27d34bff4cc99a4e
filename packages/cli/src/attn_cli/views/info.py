"""What `attn info` shows, from the record that it also prints as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from attn_cli.views.layout import column_table, failures_block, notes_block, section, status_text

__all__ = ["info_tables"]

Record = Mapping[str, Any]


def info_tables(record: Record) -> Iterator[RenderableType]:
    """Return platforms, devices, vendor libraries, failures and settings."""
    yield _versions(record)
    yield section("Platforms")
    yield column_table(
        ("Platform", "Package", "Status", "Reason"),
        [_platform_row(p, record) for p in record["platforms"]],
    )
    devices = [row for p in record["platforms"] for row in _device_rows(p)]
    yield section("Devices")
    yield column_table(("Device", "Facts"), devices) if devices else Text("none")
    libraries = [row for p in record["platforms"] for row in _library_rows(p)]
    if libraries:
        yield section("Vendor libraries")
        yield column_table(("Platform", "Library", "Status", "Version or command"), libraries)
    yield from failures_block(record["failures"])
    yield section("Settings")
    yield from _settings(record["settings"])


def _versions(record: Record) -> Text:
    torch, versions = record["torch"], record["versions"]
    builds = [f"{kind} {torch[kind]}" for kind in ("cuda", "hip", "xpu") if torch[kind]]
    words = [f"{name} {version}" for name, version in versions.items()]
    words.append(f"torch {torch['version']} ({', '.join(builds) or 'for CPU only'})")
    return Text(", ".join(words))


def _platform_row(platform: Record, record: Record) -> tuple[Text | str, ...]:
    is_current = platform["name"] == record["current_platform"]
    name = Text(platform["name"], style="bold" if is_current else "")
    is_here = platform["available"]
    status = status_text("available") if is_here else Text("unavailable", style="dim")
    reason = platform["reason"] + (" (current)" if is_current else "")
    versions = [f"{name} {version}" for name, version in platform["versions"].items()]
    words = "\n".join([reason, *([", ".join(versions)] if versions else [])])
    return (name, platform["distribution"], status, words)


def _device_rows(platform: Record) -> Iterator[tuple[str, Text]]:
    for device in platform["devices"]:
        yield (_device_label(platform, device), Text("\n").join(_device_lines(device)))


def _device_label(platform: Record, device: Record) -> str:
    kind = str(platform["torch_device_type"])
    return kind if kind == "cpu" else f"{kind}:{device['index'] or 0}"


def _device_lines(device: Record) -> Iterator[Text]:
    yield Text(device["name"], style="bold")
    capability = device["capability"]
    facts = [
        f"{device['arch']} ({device['arch_family']})",
        f"capability {capability[0]}.{capability[1]}" if capability else "",
        f"{device['compute_units']} {_units(device)}" if device["compute_units"] else "",
        f"{device['memory_bytes'] / 2**30:.1f} GiB" if device["memory_bytes"] else "",
        f"fp8 {device['fp8']}",
    ]
    yield Text(", ".join(fact for fact in facts if fact))
    if device["isa"]:
        yield Text.assemble(("isa: ", "dim"), " ".join(device["isa"]))
    yield from (Text.assemble(("note: ", "dim"), note) for note in device["notes"])


def _units(device: Record) -> str:
    names = {"nvidia": "SMs", "amd": "CUs", "intel": "Xe cores", "cpu": "cores"}
    return names.get(device["vendor"], "compute units")


def _library_rows(platform: Record) -> Iterator[tuple[Text | str, ...]]:
    for entry in platform["vendor_libraries"]:
        yield (platform["name"], entry["name"], status_text(entry["status"]), _library_text(entry))


def _library_text(entry: Record) -> Text:
    if entry["status"] == "absent":
        return Text(entry["install"], style="dim")
    words = [entry["version"] or "version unknown"]
    words += [f"{name}={value}" for name, value in entry["flags"].items()]
    if entry["error"]:
        words.append(entry["error"])
    return Text("\n").join(Text(word) for word in words)


def _settings(settings: Record) -> Iterator[RenderableType]:
    for name in ("backend", "cache_dir", "checked"):
        value = settings[name]
        yield Text.assemble((f"ATTN_{name.upper()}: ", "dim"), str(value) if value else "not set")
    yield notes_block(note for note in settings["notes"] if "unknown" in note)
