"""The stages of quantised weights, between the tokenizer and the compiler.

    graphs (float, no weights) ─▶ rescale ─▶ calibrate ─▶ round ─┬▶ qdq ─▶ step.json, a compiler
                                                                 └▶ gptq, matmulnbits, ... (formats.py)

Their results: onnx/quantised.bin and embedding.bin, onnx/decode.onnx and prefill_N.onnx in QDQ form, and in quantize/
what calibration saw, the encodings, sinks and sizes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporters.calibration import calibration_texts, from_cache, text_length, to_cache
from exporters.stages import READERS, versions
from ringstep import console
from ringstep.contract import Encoding, StepSpec
from ringstep.errors import RingstepError

if TYPE_CHECKING:
    import numpy as np

    from exporters.line import Line
    from quantize.activations import Activation
    from quantize.calibrate import Calibration
    from quantize.grid import Grid
    from quantize.model import Model
    from quantize.store import Stored

CHUNK = 128  # tokens that calibration computes at once
RANGED = 16384  # tokens that ranges are found on; what more there is serves the rounding of weights
FOLDER = "quantize"
NPZ, ACTIVATIONS, ENCODINGS = f"{FOLDER}/calibration.npz", f"{FOLDER}/activations.json", f"{FOLDER}/encodings.json"
TABLE = f"{FOLDER}/embedding.json"
FLOAT = "calibrate.float.onnx"
# Passes left out: by layers a graph must stay, since calibration walks them and a chip may need it cut.
SKIPPED = ("common-subexpressions", "duplicates", "transposed-weights", "accurate-*")


class Quantised:
    """The quantised stages of one export."""

    def __init__(self, line: Line) -> None:
        """Refuse what the scheme, the chip and the options cannot do together, before anything is computed."""
        from exporters.formats import check_formats, chosen
        from quantize.scheme import EMBEDDING, check, grid_for, paths_of, refuse
        from quantize.table import unreadable

        assert line.scheme is not None
        self.line, self.scheme, self.job = line, line.scheme, line.job
        self.chip = line.device.chip if line.device else None
        paths = paths_of(line.plan)
        check(self.scheme, paths)
        if self.chip is not None:
            refuse(self.scheme, self.chip, paths)
        table = grid_for(self.scheme, EMBEDDING)
        if reason := unreadable(table):
            raise RingstepError(f"scheme {self.scheme.name}: embedding: {reason}")
        if self.scheme.auto is not None and len(self.scheme.auto.promotions()) != 1:
            raise RingstepError(f"scheme {self.scheme.name}: [auto] steps: one promotion is supported, such as 4 -> 8")
        if self.job.embedding == "inside":
            raise RingstepError("--embedding inside: a quantised table is read by the host; leave the option out")
        if "join" in self.job.layout.values():
            raise RingstepError("--layout join: quantised attention needs all keys in one tensor; use ring or append")
        self.formats = chosen(self.job.formats or (), self.scheme)
        check_formats(self)
        self.n = 1
        while self.n * 2 <= min(CHUNK, line.context - 1):
            self.n *= 2

    @property
    def graphs(self) -> str:
        """The format whose graphs step.json is about; "" where none has any."""
        if "qdq" in self.formats:
            return "qdq"
        return "matmulnbits" if "matmulnbits" in self.formats and not self.scheme.activations.bits else ""

    def run(self, done: dict[str, dict[str, str]]) -> None:
        """Run the stages up to the graphs in order, adding what each wrote to `done`."""
        from exporters.formats import stage_matmulnbits
        from exporters.rescaled import stage_rescale
        from exporters.rounded import stage_round

        _ = self.texts  # a bad file is refused before anything is traced
        done["graphs"] = self.stage_graphs().hashes
        if self.scheme.rescale != "none":
            done["rescale"] = stage_rescale(self, done).hashes
        done["calibrate"] = self.stage_calibrate(done).hashes
        done["round"] = stage_round(self, done).hashes
        if self.graphs == "qdq":
            done["qdq"] = self.stage_qdq(done).hashes
        elif self.graphs:
            done["matmulnbits"] = stage_matmulnbits(self, done).hashes

    def run_formats(self, done: dict[str, dict[str, str]]) -> None:
        """Run what is left: formats beside the graphs, and the report."""
        from exporters.formats import STAGES
        from exporters.quantize_report import stage_report

        for name in self.formats:
            if name not in done:
                done[name] = STAGES[name](self, done).hashes
        done["report"] = stage_report(self, done).hashes

    def grid_of(self, path: str) -> Grid | None:
        """The grid of a parameter by path: what it was rounded to, which under `auto` is more than the scheme says."""
        from quantize.scheme import EMBEDDING, grid_for

        if self.scheme.auto is None or path == EMBEDDING:
            return grid_for(self.scheme, path)
        stored = self.weights().get(path)
        return stored.grid if stored else None

    def weights(self) -> dict[str, Stored]:
        """Where the rounded linears lie, by path."""
        from quantize.parameters import linears
        from quantize.store import INDEX, load_index
        from recipes.weights import key

        index = load_index(self.job.out / "onnx" / INDEX)
        return {path: index[key(s)] for path, s in linears(self.line.plan).items() if key(s) in index}

    def stage_graphs(self) -> Any:
        """onnx/*.float.onnx: the graphs of every n and of calibration, sanitised; their weights are nowhere."""
        line, chip = self.line, self.chip.name if self.chip else None
        target = "qnn-htp" if chip else "ort-mobile"

        def build(folder: Path) -> dict[str, Any]:
            import onnx_ir as ir

            from exporters.onnx import export_graphs
            from exporters.weights import load_index, write_weights
            from recipes.weights import key, sources
            from sanitize.command import sanitize_file

            home = folder / "onnx"
            home.mkdir()
            write_weights(line.checkpoint, line.plan, "float32", home, matrices=())
            placed, facts = load_index(home), {}
            specs = {"step": line.spec, "calibrate": self.calibration_spec}
            for what, spec in specs.items():
                options = line.options if what == "step" else dataclasses.replace(line.options, layout={})
                with console.progress("tracing and stamping"):
                    traced = export_graphs(line.plan, options, spec, placed, home, lambda n: f"{n}.traced.onnx")
                for n, path in traced.items():
                    name = FLOAT if what == "calibrate" else float_file(n)
                    with console.progress(f"sanitizing {name}"):
                        report = sanitize_file(
                            path, home / name, target=target, chip=chip, precision="a16" if chip else None, keep=home,
                            skip=SKIPPED,
                        )  # fmt: skip
                    inside = ir.load(home / name).graph.initializers
                    # Matrices read as zeros here: a pass that looked at them would have merged them.
                    lost = [key(s) for s in sources(line.plan) if s != line.plan.embedding and key(s) not in inside]
                    if lost:
                        raise RingstepError(f"{name}: sanitising dropped {lost[0]}; report this as a fault of ringstep")
                    facts[name] = {p["name"]: len(p["changes"]) for p in report["passes"] if p["changes"]}
                    path.unlink()
            for left in ("weights.bin", "embedding.bin", "index.json"):
                (home / left).unlink()
            return {"changes": facts}

        options = {"context": line.context, "chunks": list(line.chunks), "n": self.n, "config": line.checkpoint.config,
                   "target": target, "chip": chip, "rotate": self.scheme.rotate,
                   **dataclasses.asdict(line.options)}  # fmt: skip
        return line.stage("graphs", {"checkpoint": line.manifest.checkpoint["sha256"]}, options, versions(
            "recipes", "sanitize", "exporters/onnx.py", "exporters/trace.py", "exporters/quantised.py",
            "ringstep/contract.py", *READERS, libraries=("torch", "onnx", "onnxscript", "onnx-ir")), build)  # fmt: skip

    @cached_property
    def calibration_spec(self) -> StepSpec:
        """The contract of the graph that calibration runs: n tokens, caches as they are laid out by default."""
        from recipes.step import step_spec

        line = self.line
        options = dataclasses.replace(line.options, layout={})
        # No longer than its texts: attention would be computed over slots that stay empty.
        context = 1 + text_length(line, self.n)
        if any(kind.window and kind.window >= context for kind in line.plan.kinds.values()):
            context = line.context
        return step_spec(line.plan, options, model="", context=context, chunks=(self.n,), eos=())

    @cached_property
    def model(self) -> Model:
        """The float model by blocks, to be asked for once its weights are final."""
        return self.open_model()

    def open_model(self) -> Model:
        """The float model by blocks, with the weights that the line reads by now."""
        import onnx_ir as ir

        from quantize.folding.rotate import rotation
        from quantize.model import Model, table_of

        line = self.line
        graph = ir.load(self.job.out / "onnx" / FLOAT).graph
        rows = table_of(line.checkpoint, line.plan)
        if line.rotates:
            stream, plain = rotation(line.plan.hidden), rows
            rows = lambda ids: stream.after(plain(ids))
        return Model(line.plan, self.calibration_spec, graph, self.n, line.read, rows)

    @cached_property
    def texts(self) -> list[list[int]]:
        """Calibration's sequences of ids, the first token of each among them: n * k + 1 ids."""
        return calibration_texts(self.line, self.n)

    @cached_property
    def texts_hash(self) -> str:
        """What a stage that reads the texts depends on."""
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()

    @property
    def sequences(self) -> list[list[int]]:
        """The same as weights are rounded on: after the sink prefix where it is shipped, whole chunks of n."""
        skip = 1 if self.entries else 0
        return [ids[skip : skip + len(ids) - 1] for ids in self.texts]

    @property
    def entries(self) -> dict[tuple[int, str], np.ndarray]:
        """The sink prefix's keys and values where it is shipped; else the first token is part of every text."""
        return self.calibration.entries if self.scheme.sink_prefix == "auto" else {}

    @property
    def chunks(self) -> list[list[int]]:
        """Pieces of n ids, spread over all sequences."""
        return [ids[at : at + self.n] for at in range(0, len(self.sequences[0]), self.n) for ids in self.sequences]

    def measure(self, weight: Callable[[str], np.ndarray | None], texts: list[list[int]]) -> float:
        """SNR in dB of the logits with these weights, activations in float, over texts that follow the sink prefix."""
        import numpy as np

        from quantize.fake import logits
        from ringstep.parity.metrics import snr_db

        pairs = []
        for ids in texts:
            pairs.append([logits(self.model, ids, self.entries, chosen, None) for chosen in (lambda _: None, weight)])
        return snr_db(np.concatenate([p[0] for p in pairs]), np.concatenate([p[1] for p in pairs]))

    def stage_calibrate(self, done: dict[str, dict[str, str]]) -> Any:
        """quantize/calibration.npz: what every tensor's values were, sinks, and the sink prefix in float."""
        line = self.line
        inputs = {"checkpoint": line.manifest.checkpoint["sha256"], "ids": self.texts_hash,
                  "graph": done["graphs"][f"onnx/{FLOAT}"], **done.get("rescale", {})}  # fmt: skip
        options = {"rotate": line.rotates, "rescale": self.scheme.rescale, "ranges": bool(self.scheme.activations.bits)}
        own = versions("quantize", "recipes", "ringstep/session.py", *READERS, libraries=("torch",))

        def build(folder: Path) -> dict[str, Any]:
            from quantize.calibrate import load

            (folder / FOLDER).mkdir()
            path = folder / NPZ
            key = hashlib.sha256(json.dumps([inputs, options, own], sort_keys=True).encode()).hexdigest()
            if not from_cache(key, path):
                self.calibrate(path)
                to_cache(key, path)
            found = load(path)
            return {"tokens": found.tokens, "prefix": list(found.prefix),
                    "sinks": [dataclasses.asdict(sink) for sink in found.sinks]}  # fmt: skip

        return line.stage("calibrate", inputs, options, own, build)

    def calibrate(self, path: Path) -> None:
        """Find the sinks, then walk all text."""
        from quantize.calibrate import calibrate, find_sinks, leading, save

        layers, texts = len(self.line.plan.layers), self.texts
        with console.progress("looking for attention sinks", layers * self.n) as tick:
            sinks = find_sinks(self.model, texts[0][: self.n], tick)
        count = leading(sinks)
        if count > 1:
            # Texts have no more than their first token in common.
            console.warn(f"{count} leading positions carry massive activations; the sink prefix holds the first")
            count = 1
        first = texts[0]
        # Float activations have no ranges: of a scheme of weights alone only the sink prefix is of use.
        texts = texts[: -(-RANGED // (len(first) - 1))] if self.scheme.activations.bits else []
        # The first token is computed apart, whether or not its entries are shipped: it is in no range of the rest.
        sequences = [ids[1:] if count else ids[:-1] for ids in texts]
        with console.progress("calibrating", (layers + 1) * sum(map(len, sequences))) as tick:
            found = calibrate(self.model, sequences, first[:count], tick)
        found.sinks = sinks
        save(path, found)

    @cached_property
    def calibration(self) -> Calibration:
        """What the stage wrote."""
        from quantize.calibrate import load

        return load(self.job.out / NPZ)

    @cached_property
    def activations(self) -> dict[str, Activation]:
        """The encodings of activations that the qdq stage wrote."""
        from quantize.activations import Activation

        body = json.loads((self.job.out / ACTIVATIONS).read_text())
        return {name: Activation(e["dtype"], Encoding(e["scale"], e["zero"])) for name, e in body.items()}

    @property
    def small(self) -> dict[str, np.ndarray]:
        """The parameters that are no linear's, such as norms, in float32 by name."""
        from recipes.weights import key, sources

        return {key(s): self.line.read(s) for s in sources(self.line.plan) if len(s.out_shape) == 1}

    def stage_qdq(self, done: dict[str, dict[str, str]]) -> Any:
        """onnx/decode.onnx and prefill_N.onnx in QDQ form, and the encodings of their activations."""
        from quantize.scheme import describe

        line = self.line

        def build(folder: Path) -> dict[str, Any]:
            import onnx_ir as ir

            from exporters.formats import weight_encodings
            from exporters.onnx import graph_file
            from quantize.activations import encode
            from quantize.encodings import write_encodings
            from quantize.observe import Seen
            from quantize.qdq import to_qdq
            from quantize.report import clipped
            from quantize.store import INDEX, load_index

            (folder / "onnx").mkdir()
            (folder / FOLDER).mkdir()
            found, home, small = self.calibration, self.job.out / "onnx", self.small
            largest = json.loads((self.job.out / TABLE).read_text())["largest"]
            found.seen["x"] = Seen(-largest, largest)
            index = load_index(home / INDEX)
            every: dict[str, Activation | None] = {}
            cut: dict[str, float] = {}
            for n in line.chunks:
                model = ir.load(home / float_file(n))
                sink = found.sink if self.scheme.sink_prefix == "off" else None
                own = encode(model.graph, found.seen, self.scheme, self.chip, sink)
                every = own | every  # of a name that graphs give to different tensors decode's is told
                cut |= clipped(model.graph, found.seen, own)
                ir.save(to_qdq(model, home, own, index, small), folder / "onnx" / graph_file(n))
            body = {name: {"dtype": a.dtype, **dataclasses.asdict(a.encoding)}
                    for name, a in sorted(every.items()) if a is not None}  # fmt: skip
            (folder / ACTIVATIONS).write_text(json.dumps(body, indent=0) + "\n")
            with console.progress("writing encodings"):
                write_encodings(folder / ENCODINGS, dict(sorted(every.items())), weight_encodings(home, index))
            return {"activations": len(body), "float": len(every) - len(body), "clipped": cut}

        inputs = {"checkpoint": line.manifest.checkpoint["sha256"], **done["graphs"], **done["calibrate"],
                  **done["round"], **done.get("rescale", {})}  # fmt: skip
        options = {"chip": self.chip.name if self.chip else None, **describe(self.scheme)}
        return line.stage("qdq", inputs, options, versions(
            "quantize", "exporters/quantised.py", "exporters/formats.py", *READERS, libraries=("onnx-ir",)), build)


def float_file(n: int) -> str:
    """The file name of a sanitised float graph."""
    from exporters.onnx import graph_file

    return Path(graph_file(n)).stem + ".float.onnx"
