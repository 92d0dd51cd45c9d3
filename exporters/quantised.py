"""The stages of a quantised export, between the tokenizer and the compiler.

    graphs (float, no weights) ─▶ calibrate ─▶ round ─▶ qdq

Their results: onnx/quantised.bin and embedding.bin, onnx/decode.onnx and prefill_N.onnx in QDQ form, sink.bin, and in
quantize/ what calibration saw, the encodings and the size table.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringstep import console
from ringstep.contract import EmbeddingSpec, Encoding, PrefixSpec, StepSpec, TensorSpec
from ringstep.errors import RingstepError

if TYPE_CHECKING:
    from exporters.line import Line
    from quantize.activations import Activation
    from quantize.calibrate import Calibration
    from quantize.model import Model

CALIBRATION_TOKENS = 4096
CHUNK = 128  # tokens that calibration computes at once
SHORTEST = 64  # tokens below which ranges mean nothing
CACHED = 16  # calibrations kept in the user's cache
FOLDER = "quantize"
NPZ, ACTIVATIONS, REPORT = f"{FOLDER}/calibration.npz", f"{FOLDER}/activations.json", f"{FOLDER}/report.json"
TABLE = f"{FOLDER}/embedding.json"
FLOAT = "calibrate.float.onnx"


class Quantised:
    """The quantised stages of one export."""

    def __init__(self, line: Line) -> None:
        """Refuse what the scheme, the chip and the options cannot do together, before anything is computed."""
        from quantize.scheme import check, paths_of, refuse

        assert line.scheme is not None
        self.line, self.scheme, self.job = line, line.scheme, line.job
        self.chip = line.device.chip if line.device else None
        paths = paths_of(line.plan)
        check(self.scheme, paths)
        if self.chip is not None:
            refuse(self.scheme, self.chip, paths)
        if self.job.embedding == "inside":
            raise RingstepError("--embedding inside: a quantised table is read by the host; leave the option out")
        if "join" in self.job.layout.values():
            raise RingstepError("--layout join: quantised attention needs all keys in one tensor; use ring or append")
        self.n = 1
        while self.n * 2 <= min(CHUNK, line.context - 1):
            self.n *= 2

    def run(self, done: dict[str, dict[str, str]]) -> None:
        """Run the stages in order, adding what each wrote to `done`."""
        done["graphs"] = self.stage_graphs().hashes
        done["calibrate"] = self.stage_calibrate(done).hashes
        done["round"] = self.stage_round(done).hashes
        done["qdq"] = self.stage_qdq(done).hashes

    def stage_graphs(self) -> Any:
        """onnx/*.float.onnx: the graphs of every n and of calibration, sanitised; their weights are nowhere."""
        from exporters.line import READERS, versions

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
            write_weights(line.checkpoint, line.plan, "float32", home, matrices=False)
            placed, facts = load_index(home), {}
            specs = {"step": line.spec, "calibrate": self.calibration_spec}
            for what, spec in specs.items():
                options = line.options if what == "step" else dataclasses.replace(line.options, layout={})
                with console.progress("tracing and stamping"):
                    traced = export_graphs(line.plan, options, spec, placed, home, lambda n: f"{n}.traced.onnx")
                for n, path in traced.items():
                    name = FLOAT if what == "calibrate" else float_file(n)
                    with console.progress(f"sanitizing {name}"):
                        # By layers the graph must stay: calibration walks them, and a chip may need it cut.
                        report = sanitize_file(
                            path, home / name, target=target, chip=chip, precision="a16" if chip else None, keep=home,
                            skip=["common-subexpressions", "duplicates", "transposed-weights", "accurate-*"],
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
                   "target": target, "chip": chip, **dataclasses.asdict(line.options)}  # fmt: skip
        return line.stage("graphs", {"checkpoint": line.manifest.checkpoint["sha256"]}, options, versions(
            "recipes", "sanitize", "exporters/onnx.py", "exporters/trace.py", "exporters/quantised.py",
            "ringstep/contract.py", *READERS, libraries=("torch", "onnx", "onnxscript", "onnx-ir")), build)  # fmt: skip

    @cached_property
    def calibration_spec(self) -> StepSpec:
        """The contract of the graph that calibration runs: n tokens, caches as they are laid out by default."""
        from recipes.step import step_spec

        line = self.line
        options = dataclasses.replace(line.options, layout={})
        return step_spec(line.plan, options, model="", context=line.context, chunks=(self.n,), eos=())

    @cached_property
    def model(self) -> Model:
        """The float model by blocks."""
        import onnx_ir as ir

        from quantize.model import Model, table_of
        from recipes.weights import read

        line = self.line
        graph = ir.load(self.job.out / "onnx" / FLOAT).graph
        source = lambda parameter: read(line.checkpoint, parameter)
        return Model(line.plan, self.calibration_spec, graph, self.n, source, table_of(line.checkpoint, line.plan))

    @cached_property
    def texts(self) -> list[list[int]]:
        """Calibration's sequences of ids, the first token of each among them: n * k + 1 ids."""
        from quantize.corpus import load_texts, sequences
        from ringstep.text import Text

        line = self.line
        windows = [k.window for k in line.plan.kinds.values() if k.window]
        # Past the second wrap of every window, as far as the context allows.
        wanted = max(512, 2 * max(windows, default=0) + 8)
        length = max(1, min(line.context - 1, wanted) // self.n) * self.n
        tokens = -(-self.job.calibration_tokens // length) * length
        if tokens < SHORTEST:
            raise RingstepError(f"--calibration-tokens {tokens}: ranges need at least {SHORTEST}")
        if not (self.job.out / "tokenizer" / "tokenizer.json").is_file():
            if self.job.calibration:
                raise RingstepError("--calibration: the checkpoint has no tokenizer to read text with")
            return random_texts(line.plan.vocab, tokens // length, length + 1)
        text = Text(self.job.out)
        documents = load_texts(self.job.calibration)
        first = first_token(text, line.plan.vocab)
        return sequences(documents, text, length=length + 1, tokens=tokens // length * (length + 1), prefix=[first],
                         vocab=line.plan.vocab)  # fmt: skip

    def stage_calibrate(self, done: dict[str, dict[str, str]]) -> Any:
        """quantize/calibration.npz: what every tensor's values were, sinks, and the sink prefix in float."""
        from exporters.line import READERS, versions

        line, texts = self.line, self.texts
        ids = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
        inputs = {"checkpoint": line.manifest.checkpoint["sha256"], "ids": ids,
                  "graph": done["graphs"][f"onnx/{FLOAT}"]}  # fmt: skip
        options = {"sink_prefix": self.scheme.sink_prefix, "rotate": self.scheme.rotate, "rescale": self.scheme.rescale}
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
        count = leading(sinks) if self.scheme.sink_prefix == "auto" else 0
        if count > 1:
            # Texts have no more than their first token in common.
            console.warn(f"{count} leading positions carry massive activations; the sink prefix holds the first")
            count = 1
        # With a prefix the first token is computed apart; without, it is part of the text.
        sequences = [ids[1:] if count else ids[:-1] for ids in texts]
        with console.progress("calibrating", (layers + 1) * sum(map(len, sequences))) as tick:
            found = calibrate(self.model, sequences, texts[0][:count], tick)
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

    def stage_round(self, done: dict[str, dict[str, str]]) -> Any:
        """onnx/quantised.bin with every linear, onnx/embedding.bin, and where things lie."""
        from exporters.line import READERS, versions
        from quantize.scheme import describe

        line = self.line

        def build(folder: Path) -> dict[str, Any]:
            from quantize.grid import QuantisedWeight
            from quantize.rounding.walk import round_weights
            from quantize.scheme import grid_for, weights_for
            from quantize.store import DATA, INDEX, Writer, save_index
            from quantize.table import write_table
            from recipes.weights import key

            (folder / "onnx").mkdir()
            (folder / FOLDER).mkdir()
            found, plan = self.calibration, line.plan
            grid = grid_for(self.scheme, "embedding")
            with console.progress("quantising the embedding table"):
                table, stored, largest = write_table(line.checkpoint, plan, grid, folder / "onnx")
            body = {"embedding": dataclasses.asdict(table), "largest": largest}
            (folder / TABLE).write_text(json.dumps(body, indent=1) + "\n")
            skip = 1 if found.prefix else 0
            sequences = [ids[skip : skip + len(ids) - 1] for ids in self.texts]
            # A tied head on the table's own grid is the table.
            shared = key(plan.head) == key(plan.embedding) and stored is not None and (
                grid_for(self.scheme, "head") == grid and weights_for(self.scheme, "head").rounding == "nearest")
            with open(folder / "onnx" / DATA, "wb") as file:
                writer = Writer(file)

                def keep(path: str, name: str, weight: QuantisedWeight) -> None:
                    if path == "head" and shared and stored is not None:
                        writer.index[name] = stored
                    else:
                        writer.weight(name, weight)

                total = len(plan.layers) * sum(map(len, sequences))
                with console.progress("rounding weights", total) as tick:
                    round_weights(self.model, sequences, found, self.scheme, keep, tick)
                total_bytes = file.tell()
            save_index(folder / "onnx" / INDEX, writer.index)
            return {"bytes": total_bytes}

        inputs = {"checkpoint": line.manifest.checkpoint["sha256"], **done["graphs"], **done["calibrate"]}
        scheme = {k: v for k, v in describe(self.scheme).items() if k not in ("name", "description", "activations",
                                                                             "cache", "exceptions")}  # fmt: skip
        return line.stage("round", inputs, scheme, versions(
            "quantize", "recipes", "ringstep/session.py", *READERS, libraries=("torch",)), build)  # fmt: skip

    def stage_qdq(self, done: dict[str, dict[str, str]]) -> Any:
        """onnx/decode.onnx and prefill_N.onnx in QDQ form, and the encodings of their activations."""
        from exporters.line import READERS, versions
        from quantize.scheme import describe

        line = self.line

        def build(folder: Path) -> dict[str, Any]:
            import onnx_ir as ir

            from exporters.onnx import graph_file
            from quantize.activations import encode
            from quantize.observe import Seen
            from quantize.qdq import to_qdq
            from quantize.store import INDEX, load_index
            from recipes.weights import key, read, sources

            (folder / "onnx").mkdir()
            (folder / FOLDER).mkdir()
            found, home = self.calibration, self.job.out / "onnx"
            largest = json.loads((self.job.out / TABLE).read_text())["largest"]
            found.seen["x"] = Seen(-largest, largest)
            small = {key(s): read(line.checkpoint, s) for s in sources(line.plan) if len(s.out_shape) == 1}
            index = load_index(home / INDEX)
            every: dict[str, Activation] = {}
            for n in line.chunks:
                model = ir.load(home / float_file(n))
                own = encode(model.graph, found.seen, self.scheme, self.chip)
                every |= own
                ir.save(to_qdq(model, home, own, index, small), folder / "onnx" / graph_file(n))
            body = {name: {"dtype": a.dtype, **dataclasses.asdict(a.encoding)} for name, a in sorted(every.items())}
            (folder / ACTIVATIONS).write_text(json.dumps(body, indent=0) + "\n")
            return {"activations": len(every)}

        inputs = {"checkpoint": line.manifest.checkpoint["sha256"], **done["graphs"], **done["calibrate"],
                  **done["round"]}  # fmt: skip
        options = {"chip": self.chip.name if self.chip else None, **describe(self.scheme)}
        return line.stage("qdq", inputs, options, versions(
            "quantize", "exporters/quantised.py", *READERS, libraries=("onnx-ir",)), build)  # fmt: skip

    def contract(self, spec: StepSpec, folder: Path) -> StepSpec:
        """The contract with encodings, the table and the sink prefix, which is written into `folder`."""
        from ringstep.encoding import write_prefix

        encodings = json.loads((self.job.out / ACTIVATIONS).read_text())
        graphs = tuple(dataclasses.replace(
            g, inputs=tuple(encoded(t, encodings) for t in g.inputs),
            outputs=tuple(encoded(t, encodings) for t in g.outputs),
            hidden=tuple(encoded(t, encodings) for t in g.hidden)) for g in spec.graphs)  # fmt: skip
        caches = tuple(dataclasses.replace(c, dtype=encodings[f"past_key_{c.layer}"]["dtype"]) for c in spec.caches)
        mask = encodings[f"mask_{spec.masks[0].name}"]
        table = json.loads((self.job.out / TABLE).read_text())["embedding"]
        table["shape"] = tuple(table["shape"])
        made = dataclasses.replace(
            spec, dtype=encodings["x"]["dtype"], mask_value=-mask["scale"] * mask["zero"], caches=caches, graphs=graphs,
            embedding=EmbeddingSpec(**table), scheme=self.scheme.name,
        )  # fmt: skip
        found = self.calibration
        if not found.prefix:
            return made
        assert found.logits is not None
        entries = {key: array[0] for key, array in found.entries.items()}
        prefix: PrefixSpec = write_prefix(folder / "sink.bin", made, found.prefix, entries, found.logits)
        return dataclasses.replace(made, prefix=prefix)


def encoded(tensor: TensorSpec, encodings: Mapping[str, Any]) -> TensorSpec:
    """A tensor of the float contract with its quantised type and encoding."""
    own = encodings.get(tensor.name)
    if own is None:
        return tensor
    return dataclasses.replace(tensor, dtype=own["dtype"], encoding=Encoding(own["scale"], own["zero"]))


def float_file(n: int) -> str:
    """The file name of a sanitised float graph."""
    from exporters.onnx import graph_file

    return Path(graph_file(n)).stem + ".float.onnx"


def first_token(text: Any, vocab: int) -> int:
    """The id that texts of this model begin with: its chats', else what the tokenizer puts first, else bos."""
    ids = text.chat("a") if text.template else text.encode("a")
    if not text.template:
        bos = text.tokenizer.token_to_id(text.specials().get("bos_token") or "")
        ids = [bos] if bos is not None and ids[:1] != [bos] else ids
    if not ids or ids[0] >= vocab:
        raise RingstepError("the tokenizer makes no id of this model's vocabulary; give the checkpoint's own tokenizer")
    return int(ids[0])


def random_texts(vocab: int, count: int, length: int) -> list[list[int]]:
    """Seeded random ids, for a checkpoint without a tokenizer; all begin alike."""
    import numpy as np

    console.warn("the checkpoint has no tokenizer: calibration runs on random ids, whose ranges are no text's")
    ids = np.random.default_rng(0).integers(0, vocab, (count, length))
    ids[:, 0] = ids[0, 0]
    return [[int(i) for i in row] for row in ids]


def cache_folder() -> Path:
    """Where calibrations are kept by content."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "ringstep" / "calibration"


def from_cache(key: str, path: Path) -> bool:
    """Copy a calibration from the user's cache; False when there is none, or it cannot be read."""
    from quantize.calibrate import load

    kept = cache_folder() / f"{key}.npz"
    try:
        load(kept)
        shutil.copyfile(kept, path)
        os.utime(kept)
        return True
    except (RingstepError, OSError):
        return False


def to_cache(key: str, path: Path) -> None:
    """Keep a calibration; the ones used longest ago go. A cache that cannot be written only costs time."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{key}.tmp-{os.getpid()}"
        shutil.copyfile(path, temporary)
        os.replace(temporary, folder / f"{key}.npz")
        for old in sorted(folder.glob("*.npz"), key=lambda p: p.stat().st_mtime)[:-CACHED]:
            old.unlink(missing_ok=True)
    except OSError:
        return
