"""Qualcomm's QNN plugin of ONNX Runtime, as the compiler and the simulator use it: in child processes only.

The plugin's native code can take its process down; everything that opens a session here is meant for
ringstep.child. `require`, `explain` and `version` are safe anywhere.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringstep.child import last_error
from ringstep.errors import RingstepError

if TYPE_CHECKING:
    import onnxruntime as ort

PROVIDER = "QNNExecutionProvider"
NAMED_NODES = 8


def require() -> None:
    """Raise RingstepError where the plugin is not installed."""
    if importlib.util.find_spec("onnxruntime_qnn") is None:
        raise RingstepError(
            "the QNN compiler and simulator need the package onnxruntime-qnn, which is for Linux on x86-64"
        )


def version() -> str:
    """Return the plugin's and Qualcomm's SDK version, such as "onnxruntime-qnn 2.7.0, QAIRT 2.51.0"."""
    require()
    from onnxruntime_qnn import build_and_package_info as info

    return f"onnxruntime-qnn {info.__version__}, QAIRT {info.qnn_version}"


@functools.cache
def devices() -> list[Any]:
    """Register the plugin with this process, once, and return its devices."""
    import onnxruntime as ort
    import onnxruntime_qnn as plugin

    ort.register_execution_provider_library(PROVIDER, plugin.get_library_path())
    return [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]


def session_options(*, soc_model: int | None, fp16: bool, context: Path | None = None) -> ort.SessionOptions:
    """Options for an HTP session in which a node that the NPU lacks is an error, never a detour to the CPU.

    `fp16` lets float32 tensors be computed as float16 (needs `soc_model`; graphs typed float16 do not ask
    for it). With `context` the session writes that *_ctx.onnx, and its binary beside it.
    """
    import onnxruntime as ort
    import onnxruntime_qnn as plugin

    options = ort.SessionOptions()
    options.log_severity_level = 2  # the reason for a refusal is a warning
    options.intra_op_num_threads = 1  # nothing runs on the CPU provider
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if context is not None:
        options.add_session_config_entry("ep.context_enable", "1")
        options.add_session_config_entry("ep.context_file_path", str(context))
        options.add_session_config_entry("ep.context_embed_mode", "0")
    settings = {"backend_path": plugin.get_qnn_htp_path(), "htp_graph_finalization_optimization_mode": "3"}
    if soc_model is not None:
        settings["soc_model"] = str(soc_model)
        if fp16:
            settings["enable_htp_fp16_precision"] = "1"
    options.add_provider_for_devices(devices(), settings)
    return options


def open_session(
    model: Path, *, soc_model: int | None, fp16: bool, context: Path | None = None
) -> ort.InferenceSession:
    """Open (and so compile) an ONNX file, or a *_ctx.onnx. Raises what ONNX Runtime raises."""
    import onnxruntime as ort

    return ort.InferenceSession(str(model), session_options(soc_model=soc_model, fp16=fp16, context=context))


def assigned_ops(session: ort.InferenceSession) -> dict[str, int]:
    """Count the nodes that the NPU took, by type, after ONNX Runtime's own rewrites."""
    graphs = [graph for graph in session.get_provider_graph_assignment_info() if graph.ep_name == PROVIDER]
    return dict(Counter(node.op_type for graph in graphs for node in graph.get_nodes()))


def refused_ops(model: Path, soc_model: int) -> dict[str, int]:
    """Count the nodes of an ONNX file that HTP leaves to the CPU, by type, without ONNX Runtime's own rewrites.

    Float32 is computed in fp16. For a child process; raises what ONNX Runtime raises.
    """
    import onnxruntime as ort

    options = session_options(soc_model=soc_model, fp16=True)
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "0")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(model), options)
    graphs = [graph for graph in session.get_provider_graph_assignment_info() if graph.ep_name != PROVIDER]
    return dict(Counter(node.op_type for graph in graphs for node in graph.get_nodes()))


def explain(log: str) -> str:
    """Find the cause in the log of a session that failed; "" if there is none."""
    lines = [line for line in log.splitlines() if "Unsupported nodes in QNN EP" in line]
    nodes = re.findall(r"\{ name: (.*?), type: (.*?) \}", lines[-1]) if lines else []
    # An attempted fusion that is refused warns too, so these lines count only where no list was printed.
    nodes = nodes or re.findall(r"failed for node `(.*?)` of type `(.*?)`", log)
    if nodes:
        named = [f"{name} ({kind})" for name, kind in dict.fromkeys(nodes)]
        more = f" and {len(named) - NAMED_NODES} more" if len(named) > NAMED_NODES else ""
        return f"the NPU refuses {', '.join(named[:NAMED_NODES])}{more}"
    if "contextCreateFromBinary failed" in log and "NOT_SUPPORTED" in log:
        return "the simulator cannot load this context; one whose graphs share weights runs on phones only"
    if "Failed to write context cache file" in log:
        return "the context binary cannot be written: the disk is full or failing"
    errors = re.findall(r"\[E:onnxruntime:.*?\] (.*)", log)
    useful = [line for line in errors if "fallback to CPU EP" not in line]
    return (useful or errors or [last_error(log)])[-1]
