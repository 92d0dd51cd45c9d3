"""What `ringstep profile`, `place` and `jobs` print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringstep import console

if TYPE_CHECKING:
    from pathlib import Path

    from exporters.aihub.plan import Chain, Planned
    from ringstep.manifest import Manifest
    from ringstep.profiling.ledger import Job
    from ringstep.profiling.profile import Profile
    from sanitize.lint import Finding

LINT_SHOWN = 4


def print_results(results: list[dict[str, Any]]) -> None:
    """One row a part and place, then what failed and why, and what fell to the CPU."""
    rows: list[tuple[object, ...]] = []
    for r in results:
        profile: Profile | None = r["profile"]
        if profile is None:
            rows.append((r["part"], r["device"], r["target"], r["state"], "", "", "", ""))
            continue
        ms = lambda us: f"{us / 1000:.3f}"
        db = "" if profile.snr_db is None else f"{profile.snr_db:.1f}"
        verdict = "" if profile.parity == "passed" else profile.parity.upper()
        rows.append((r["part"], r["device"], r["target"], ms(profile.median_us), ms(profile.min_us),
                     ms(profile.p95_us), len(profile.times_us), f"{db} {verdict}"))  # fmt: skip
    say_made_up(results)
    console.table("", ["part", "device", "on", "median ms", "min", "p95", "runs", "SNR dB"], rows)
    for r in results:
        print_trouble(r)
    good = [r["profile"] for r in results if r["profile"] and r["profile"].place.unit == "npu"]
    for subject in dict.fromkeys((p.subject.model, p.place.device, p.subject.precision) for p in good if not whole(p)):
        model, device, precision = subject
        console.say(f"their sum: ringstep profiles compose {model} --device {device} --precision {precision}")


def say_made_up(results: list[dict[str, Any]]) -> None:
    """What stands above figures that no phone has made."""
    if any(r["profile"] and r["profile"].origin == "synthetic" for r in results):
        console.line("SYNTHETIC: made up by a service on this machine, no phone ran")


def whole(profile: Profile) -> bool:
    """Whether it is of a step, not of one layer of it."""
    return profile.subject.part.startswith(("step", "prefill"))


def report(results: list[dict[str, Any]], json_: bool, show: Callable[[list[dict[str, Any]]], None]) -> int:
    """Print results by `show`, or as JSON; the exit code: 0 where every one is a latency with parity."""
    if json_:
        console.print_json(plain(results))
    else:
        show(results)
    good = all(r["profile"] is not None and r["profile"].parity == "passed" for r in results)
    return 0 if good else console.GATE_FAILED


def print_trouble(r: dict[str, Any]) -> None:
    """Everything about one result that is not as it should be."""
    name = f"{r['part']} on {r['device']} {r['target']}"
    profile: Profile | None = r["profile"]
    if profile is None:
        of = f"{r['jobs'][-1]['kind']} job {r['jobs'][-1]['id']} " if r["jobs"] else ""
        console.warn(f"{name}: {of}{r['state']}: {r['reason']}")
        for text in r.get("log", []):
            console.line(f"    {text}")
        for finding in r.get("findings", []):
            console.line(f"    lint {finding['rule']}: {finding['node']}: {finding['what']}; {finding['fix']}")
        return
    if profile.parity == "failed":
        console.warn(f"{name}: the phone computes something else; this latency is of a model that does not work: "
                     f"{'; '.join(r['parity']['failures'][:3])}")  # fmt: skip
    if profile.parity == "unchecked":
        console.warn(f"{name}: nothing was compared; this is a latency without parity")
    if fallen := profile.on_cpu:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(op.type for op in fallen).most_common(5))
        console.warn(f"{name}: {len(fallen)} of {len(profile.ops)} OPERATIONS RAN ON THE CPU, not the "
                     f"{profile.place.unit.upper()}: {kinds}")  # fmt: skip


def plain(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results as JSON: the profile's figures beside it, its operations left to the store."""
    import dataclasses

    body = []
    for r in results:
        profile: Profile | None = r["profile"]
        figures = None
        if profile is not None:
            figures = dataclasses.asdict(profile) | {
                "median_us": profile.median_us, "min_us": profile.min_us, "p95_us": profile.p95_us,
                "units": profile.units, "on_cpu": len(profile.on_cpu)}  # fmt: skip
            del figures["ops"]
        body.append(r | {"profile": figures})
    return body


def lint_of(chain: Chain) -> list[Finding]:
    """What the lint says of a chain's graph for its chip."""
    return lint_source(chain.source, chain.device.id, chain.precision)


def lint_part(manifest: Manifest, job: Job) -> list[Finding]:
    """The same of the graph that a noted job was about; nothing where that is gone."""
    from exporters.aihub.parts import HOME

    name, precision = str(job.about.get("part")), job.about.get("subject", {}).get("precision", "")
    home = manifest.folder
    places = [home / HOME / "parts" / f"{name}.onnx" / f"{name}.onnx", home / "onnx" / f"{name}.onnx"]
    found = [path for path in places if path.is_file() and "/" not in name]
    return lint_source(found[0], job.about.get("place", {}).get("device", ""), precision) if found else []


def lint_source(path: Path, device: str, precision: str) -> list[Finding]:
    """Errors and warnings of the lint of an ONNX file for a device's chip."""
    from ringstep.devices import find_device
    from sanitize.lint import lint_file
    from sanitize.target import find_target

    chip = find_device(device).chip
    target = find_target("qnn-htp", chip.name, "fp16" if precision in ("fp16", "fp32") and chip.fp16 else "a16")
    return [f for f in lint_file(path, target) if f.severity != "note"]


def matching(findings: list[Finding], text: str) -> list[Finding]:
    """The findings that a failure may be due to: errors, and whatever has its node named in the text; errors first."""
    named = [f for f in findings if f.node and f.node.strip("/").split("/")[-1] in text and f.node in text]
    return list(dict.fromkeys([*named, *(f for f in findings if f.severity == "error")]))


def sending(planned: Planned, known: set[str]) -> list[dict[str, Any]]:
    """What a dry run reports: every upload and job, and whether it is there already."""
    uploads = [{"what": c.kind, "name": c.label, "bytes": c.bytes, "sha256": c.sha256, "sent": c.sha256 in known}
               for c in planned.contents.values()]  # fmt: skip
    jobs = [{"what": f"{job.kind} job", "name": job.name, "device": job.device, "options": job.options,
             "sent": job.key in known} for chain in planned.chains for job in chain.jobs]  # fmt: skip
    return [*uploads, *jobs]


def print_sending(planned: Planned, entries: list[dict[str, Any]]) -> None:
    """Lint findings first, then uploads and jobs."""
    seen = set()
    for chain in planned.chains:
        if (chain.source, chain.device.chip.name) in seen:
            continue
        seen.add((chain.source, chain.device.chip.name))
        found = lint_of(chain)
        counts = Counter(f.severity for f in found)
        summary = ", ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in counts.items()) or "clean"
        console.line(f"lint of {chain.part.subject} for {chain.device.chip.name}: {summary}")
        for f in found[:LINT_SHOWN]:
            console.line(f"    {f.severity} {f.rule}: {f.node}: {f.what}")
        if len(found) > LINT_SHOWN:
            console.line(f"    and {len(found) - LINT_SHOWN} more; see ringstep lint {chain.source}")
    for chain in planned.chains:
        if chain.refused:
            console.warn(f"{chain.label}: refused here: {chain.refused}")
    model = next((job.about["subject"]["model"] for chain in planned.chains for job in chain.jobs), "")
    size = lambda e: console.human_bytes(e["bytes"]) if "bytes" in e else e["options"]
    rows = [(e["what"], e["name"].removeprefix(model).strip(), size(e), "there" if e["sent"] else "to send")
            for e in entries]  # fmt: skip
    print()
    console.table("", ["what", "name", "size or options", ""], rows)
    left = sum(e["bytes"] for e in entries if "bytes" in e and not e["sent"])
    jobs = sum("options" in e and not e["sent"] for e in entries)
    console.line(f"{console.human_bytes(left)} to upload, {jobs} jobs to submit; nothing was sent")


def print_placement(results: list[dict[str, Any]]) -> None:
    """A row a part and device, a column a place: median ms, marked where the outputs are not the reference's."""
    places = list(dict.fromkeys(r["target"] for r in results))
    rows = []
    for part, device in dict.fromkeys((r["part"], r["device"]) for r in results):
        own = {r["target"]: r for r in results if (r["part"], r["device"]) == (part, device)}
        rows.append((part, device, *(cell(own[place]) for place in places)))
    say_made_up(results)
    console.line("median ms (dB against the reference)")
    console.table("", ["part", "device", *places], rows)
    for r in results:
        print_trouble(r)


def cell(r: dict[str, Any]) -> str:
    """One figure of the table: ms and dB, or why there is none."""
    profile: Profile | None = r["profile"]
    if profile is None:
        return str(r["state"])
    mark = "" if profile.parity == "passed" else f" {profile.parity.upper()}"
    cpu = " +CPU" if profile.on_cpu else ""
    db = "?" if profile.snr_db is None else f"{profile.snr_db:.0f}"
    return f"{profile.median_us / 1000:.3f} ({db}){mark}{cpu}"
