"""What the commands print of exports and proofs."""

from __future__ import annotations

from typing import Any

from ringstep import console


def show_manifest(manifest: Any) -> dict[str, Any]:
    """What an export reports: folder, stages, and the proof."""
    import json

    from exporters.quantize_report import read_report

    stages = [
        {"stage": r.name, "seconds": r.seconds, "peak_rss_anon_bytes": r.peak_rss_anon_bytes,
         "bytes": sum(o.bytes for o in r.outputs.values()), "facts": r.facts}
        for r in manifest.stages.values()
    ]  # fmt: skip
    path = manifest.folder / "parity.json"
    # A proof of an earlier state of the folder has been dropped from the manifest by now.
    proof = json.loads(path.read_text()) if "parity" in manifest.stages and path.exists() else None
    passed = manifest.stages["parity"].facts.get("passed") if proof else None
    if "module" in manifest.stages:
        passed = manifest.stages["module"].facts.get("passed")
    body = {"folder": str(manifest.folder), "options": manifest.options, "versions": manifest.versions,
            "stages": stages, "parity": proof, "passed": passed}  # fmt: skip
    report = read_report(manifest)
    return body if report is None else body | {"quantised": report}


def finish(body: dict[str, Any], as_json: bool) -> None:
    """Print what show_manifest gave, and the stages that were run ("redone")."""
    for text in body.get("quantised", {}).get("warnings", []):
        console.warn(text)
    if as_json:
        console.print_json(body)
        return
    print_export(body)
    if not body["redone"]:
        console.say("everything was up to date: no stage was run again")


def print_export(body: dict[str, Any]) -> None:
    """The tables at the end of an export."""
    rows = [
        (s["stage"], console.human_seconds(s["seconds"]), console.human_bytes(s["peak_rss_anon_bytes"]),
         console.human_bytes(s["bytes"]))
        for s in body["stages"]
    ]  # fmt: skip
    console.line(body["folder"])
    console.table("", ["stage", "time", "peak memory", "written"], rows)
    compiled = [(s["stage"], s["facts"]) for s in body["stages"] if s["stage"].startswith("qnn-")]
    if compiled:
        facts = compiled[0][1]
        ops = [(name, sum(f["npu_ops"].values()), 0, console.human_bytes(f["binary_bytes"])) for name, f in compiled]
        print()
        console.table(f"for {facts['chip']} by {facts['version']}", ["", "NPU operations", "on the CPU", "size"], ops)
    for stage in body["stages"]:
        if stage["stage"] == "module":
            print_module(stage["facts"])
    if "quantised" in body:
        from exporters.quantize_report import print_quantised

        print_quantised(body["quantised"])
    if body["parity"] is not None:
        print_reports(body["parity"])


def print_module(facts: dict[str, Any]) -> None:
    """The programs of a module with fixed shapes, and the verdict."""
    rows = [(p["file"], p["chunk"], sum(sum(m["delegates"].values()) for m in p["methods"].values()),
             sum(sum(m["cpu_kernels"].values()) for m in p["methods"].values()), console.human_bytes(p["bytes"]),
             ", ".join(f"{name} {db:.1f}" for name, db in p["snr_db"].items())) for p in facts["programs"]]  # fmt: skip
    print()
    console.table(f"{facts['method']} against {facts['reference']}",
                  ["file", "chunk", "delegates", "on the CPU", "size", "SNR dB"], rows)  # fmt: skip
    note = ", simulated" if facts["simulated"] else ""
    console.line(f"{'passed' if facts['passed'] else 'FAILED'} (at least {facts['limit_db']:g} dB{note})")


def print_reports(reports: list[dict[str, Any]]) -> None:
    """One table with a row an engine, then the answers and the verdict."""
    rows = []
    for report in reports:
        s = report["summary"]
        caches = f"{s['caches_db']['min']:.1f}" if s["caches_db"] else ""
        rows.append((s["engine"], s["scheme"] or s["dtype"].replace("float", "fp"), s["tokens"],
                     f"{s['snr_db']['min']:.1f}", f"{s['snr_db']['median']:.1f}", caches,
                     f"{100 * s['top1']:.1f}", f"{100 * s['top5']:.1f}", f"{s['kl']['mean']:.0e}"))  # fmt: skip
    columns = ["engine", "type", "tokens", "min dB", "median", "caches", "top-1 %", "top-5 %", "KL"]
    print()
    console.table(f"parity with {reports[0]['summary']['reference']}", columns, rows)
    for report in reports:
        s, answer = report["summary"], report["answer"]
        if answer:
            console.line(f"prompt      {answer['prompt']}")
            console.line(f"original    {answer['reference_text']}")
            console.line(f"{s['engine']:11} {answer['text']}  [{answer['verdict']}]")
        least = f"at least {s['threshold_db']:.0f}"
        notes = [f"{s['snr_db']['pooled']:.1f} dB in all, {least}" if s["scheme"] else f"{least} dB everywhere"]
        notes += [f"{s['activations']} activations"] * (s["dtype"] == "float16")
        notes += [f"{s['ambiguous']} near tie{'s' * (s['ambiguous'] > 1)}"] * (s["ambiguous"] > 0)
        notes += ["simulated"] * s["simulated"]
        failures = s["failures"]
        if found := report.get("windows"):
            worst = min(min(f["logits_db"], f["cache_db"]) for f in found["feedings"])
            console.line(f"{s['engine']}: windows {found['mode']}: {len(found['feedings'])} ways to feed, worst "
                         f"{worst:.1f} dB (at least {found['windows_db']:.0f})")  # fmt: skip
            failures = [f for f in failures if f not in found["failures"]]
            failures += found["failures"][:1] + [f"{len(found['failures']) - 1} more"] * (len(found["failures"]) > 1)
        verdict = "passed" if s["passed"] else "FAILED: " + "; ".join(failures)
        console.line(f"{s['engine']}: {verdict} ({', '.join(notes)})")


def print_positions(report: dict[str, Any]) -> None:
    """Every position and every cache of a report."""
    rows = [(p["position"], p["token"], f"{p['snr_db']:.1f}", p["top1"], f"{100 * p['top5']:.0f} %", f"{p['kl']:.1e}")
            for p in report["positions"]]  # fmt: skip
    console.table("positions", ["position", "token", "dB", "top-1", "top-5", "KL"], rows)
    caches = [(c["layer"], f"{c['key_db']:.1f}", f"{c['value_db']:.1f}") for c in report["caches"]]
    console.table("caches", ["layer", "keys dB", "values dB"], caches)
