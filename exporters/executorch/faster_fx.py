"""torch.fx without what a lowering has no use for, which is a good part of its time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.fx import traceback


@contextlib.contextmanager
def faster_fx() -> Iterator[None]:
    """Without what a lowering does not need: stack traces, provenance and source code of every node in every pass.

    Together a third of the time: each pass deep-copies the history of each node, and prints its graph as Python.
    """
    compiled, decomposed = torch.fx.GraphModule.recompile, torch.export.ExportedProgram.run_decompositions

    def recompile(self: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            compiled(self)
            return self.forward(*args, **kwargs)

        self._code, codegen = "", self.graph._codegen
        if hasattr(codegen, "pytree_info"):
            self._in_spec, self._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        type(self).forward = forward

    def run_decompositions(self: Any, table: Any = None, **kwargs: Any) -> Any:
        # The first, without a table, makes a graph functional; after it only operators of the table change anything.
        if not table or any(node.target in table for node in self.graph.nodes):
            return decomposed(self, table, **kwargs)
        return self

    with patch.object(torch.fx.config, "do_not_emit_stack_traces", True), \
         patch.object(torch.fx.GraphModule, "recompile", recompile), \
         patch.object(torch.export.ExportedProgram, "run_decompositions", run_decompositions), \
         patch.object(traceback.NodeSource, "__init__", _no_history):  # fmt: skip
        yield


def _no_history(self: Any, node: Any, pass_name: str = "", action: Any = None) -> None:
    self.pass_name, self.action, self.node_info, self.from_node = pass_name, [], None, []
    self._action_string = self._dict = None
