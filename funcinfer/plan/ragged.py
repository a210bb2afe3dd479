"""The ragged exchange of tokens between experts' ranks on paper, with its counts given.

`funcinfer.layers.dispatch.ragged_exchange` reads on the host how many tokens go where, which meta
tensors can't tell. Somebody who expects certain counts, or has measured them, gives them.
"""

from collections.abc import Sequence

import torch

from funcinfer.layers.dispatch import Compute, Exchange
from funcinfer.sharding import Axis, all_to_all_v, axis_index, axis_size


def counted_exchange(counts: Sequence[Sequence[int]]) -> Exchange:
    """An exchange for meta tensors that sends `counts[i][j]` tokens from rank i to rank j.

    It calls the collectives of `ragged_exchange`, in its order and shapes. ValueError, when it is
    called, for counts of another number of ranks.

    >>> from funcinfer.sharding import Mesh
    >>> from funcinfer.sharding.record import record
    >>> x, ids, w = (torch.empty(s, device="meta") for s in ((3, 8), (2, 3, 1), (3, 1)))
    >>> with record(Mesh(ep=2)) as found:
    ...     y = counted_exchange([[3, 1], [0, 2]])(lambda x, ids, w: x, x, ids, w, "ep")
    >>> [c.shape for c in found if c.call == "all_to_all_v"]
    [(4, 8), (4, 1), (4, 1), (3, 8)]
    """

    def exchange(
        compute: Compute,
        x_TD: torch.Tensor,
        ids_nTK: torch.Tensor,
        weights_TK: torch.Tensor,
        axis: Axis,
    ) -> torch.Tensor:
        n, here = axis_size(axis), axis_index(axis)
        if len(counts) != n or any(len(row) != n for row in counts):
            raise ValueError(f"counts of {len(counts)} ranks to each other, but {axis!r} has {n}")
        going, coming = list(counts[here]), [row[here] for row in counts]

        def send(x: torch.Tensor) -> torch.Tensor:
            all_to_all_v(x.new_empty(sum(going), x.shape[-1]), axis, going)
            return x.new_empty(sum(coming), x.shape[-1])

        y_MD = compute(send(x_TD), send(ids_nTK), send(weights_TK))
        all_to_all_v(y_MD, axis, coming)
        return torch.empty_like(x_TD)

    return exchange
