"""Messages between two ranks of an axis, as operators of a graph; no kernels, since only compiled graphs hold them.

`send` starts and never blocks; what is sent must not be overwritten before `flush`, which waits for all that was sent.
`receive` starts; `received` waits and gives the value. Messages between two ranks meet by tag.
"""

from __future__ import annotations

import torch

__all__ = ["FLUSH", "RECEIVE", "RECEIVED", "SEND"]

_library = torch.library.Library("ptrainx", "FRAGMENT")
_library.define("send(Tensor x, int peer, int tag, str group) -> ()")
_library.define("receive(int[] size, ScalarType dtype, Device device, int peer, int tag, str group) -> Tensor")
_library.define("received(Tensor message) -> Tensor")
_library.define("flush(str group) -> ()")

SEND = torch.ops.ptrainx.send.default
RECEIVE = torch.ops.ptrainx.receive.default
RECEIVED = torch.ops.ptrainx.received.default
FLUSH = torch.ops.ptrainx.flush.default
