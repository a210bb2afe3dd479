"""Rules: logical axis -> mesh axes. Which dims may be sharded is written in specs; how they are is
written here.

A change of parallelism is a change of rules, never of a layer. `check` refuses a set of rules that
the moves of `funcinfer.sharding.reshard` and the layers can't serve, at config time, with a message
for each law that is broken.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from funcinfer.sharding.explain import explain
from funcinfer.sharding.mesh import (
    Axis,
    Mesh,
    P,
    as_axis,
    both,
    drop,
    extends,
    join_axes,
    longer,
    names,
    suggest,
)
from funcinfer.sharding.reshard import moves
from funcinfer.spec import Member, ParamSpec, is_spec
from funcinfer.tree import leaves_with_path, tree_map

LIBRARY_AXES: Mapping[str, str] = MappingProxyType(
    {
        "requests": "page-table rows, new KV rows, slots, rows of logits",
        "pages": "cache pages; the same as requests",
        "page_tokens": "offset inside a page (decode context parallelism)",
        "index_page_tokens": "offset inside a page of indexer keys",
        "tokens": "token ids, positions, input of blocks",
        "q_tokens": "attention queries",
        "residual_tokens": "residual stream and norms (sequence parallelism)",
        "o_tokens": "input of o_proj; by default q_tokens less the axes of o_heads",
        "moe_tokens": "router and dispatch",
        "heads": "query heads",
        "kv_heads": "key and value heads, and their cache",
        "o_heads": "heads at the input of o_proj",
        "index_heads": "indexer heads",
        "mlp": "width of a dense MLP",
        "shared_mlp": "width of shared experts",
        "experts": "experts",
        "expert_mlp": "width of an expert",
        "vocab_in": "rows of the embedding",
        "vocab_out": "rows of the head",
        "logits": "vocabulary dim of the logits that are returned",
        "linear_heads": "heads of linear attention",
        "linear_tokens": "tokens of linear attention",
        "layers": "list of layers (pipeline stages)",
        "embed": "model width; never sharded",
        "head_dim": "width of a head; never sharded",
        "q_lora": "query latent; never sharded",
        "kv_lora": "key-value latent; never sharded",
    }
)
NEVER_SHARDED = ("embed", "head_dim", "q_lora", "kv_lora")
TOKEN_AXES = ("residual_tokens", "q_tokens", "moe_tokens")
PADDABLE = ("vocab_in", "vocab_out", "experts")


class Rules(Mapping[str, Axis]):
    """An immutable map from logical axes to mesh axes. The library's own names default to None.

    A new name must be given, None included, so that a typo can be told from an axis that is not
    used.

    >>> rules = Rules(heads="tp", vocab_out=("dp", "tp"))
    >>> rules.spec("heads", None, "embed")
    P('tp', None, None)
    >>> rules["haeds"]
    Traceback (most recent call last):
    KeyError: "no rule for logical axis 'haeds'; did you mean 'heads' ...
    """

    def __init__(self, **rules: Axis) -> None:
        given = {name: as_axis(axis, f"rule {name}") for name, axis in rules.items()}
        for name, axis in given.items():
            if len(set(names(axis))) != len(names(axis)):
                raise ValueError(f"rule {name}={axis!r} names a mesh axis twice")
        rest = {name: None for name in LIBRARY_AXES if name not in given and name != "o_tokens"}
        self._rules: dict[str, Axis] = {**given, **rest}
        self._given = given

    @classmethod
    def none(cls) -> "Rules":
        """Nothing sharded: the rules of one device."""
        return cls()

    def __getitem__(self, name: str) -> Axis:
        if name in self._rules:
            return self._rules[name]
        if name == "o_tokens":
            return drop(self._rules["q_tokens"], self._rules["o_heads"])
        raise KeyError(
            f"no rule for logical axis {name!r}{suggest(name, self._rules)}."
            f" Give it: Rules({name}=None)"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._rules.items(), key=lambda kv: kv[0])))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and self._rules == other._rules

    def __repr__(self) -> str:
        return f"Rules({', '.join(f'{n}={a!r}' for n, a in self._given.items() if a is not None)})"

    def replace(self, **rules: Axis) -> "Rules":
        """The same rules but for those given."""
        return Rules(**{**self._given, **rules})

    def spec(self, *axes: str | None, member: Member | None = None) -> P:
        """The layout of a tensor with these logical axes, and of the entries `member` of a list.

        KeyError for an unknown one, ValueError for a mesh axis that would shard two dims.

        >>> Rules(layers="pp").spec("embed", member=Member("layers", (2,), 3))
        P(None, on=Member(axis='pp', entries=(2,), count=3))
        """
        entries = [None if a is None else self[a] for a in axes]
        on = None
        if member is not None:
            stages = join_axes(*(self[name] for name in names(member.axis)))
            on = None if stages is None else replace(member, axis=stages)
        try:
            return P(*entries, on=on)
        except ValueError as error:
            raise ValueError(f"logical axes {axes}: {error}") from None

    def layout(self, spec: ParamSpec) -> P:
        """The layout of the tensor that `spec` declares."""
        return self.spec(*spec.axes, member=spec.member)

    def specs(self, tree: Any) -> Any:
        """The layouts of a tree of ParamSpec: the same tree of `P`."""
        return tree_map(self.layout, tree, is_leaf=is_spec)

    def check(self, specs: Any, mesh: Mesh) -> None:
        """ValueError listing every reason why these rules can't lay out `specs` on `mesh` or serve
        a forward.
        """
        if found := self.problems(specs, mesh):
            raise ValueError("these rules are not legal:\n  " + "\n  ".join(found))

    def problems(self, specs: Any, mesh: Mesh) -> list[str]:
        """Every reason why `check` would refuse, one line each; empty where the rules are legal."""
        leaves = leaves_with_path(specs, is_leaf=is_spec)
        found = _unknown_names(self, [s for _, s in leaves], mesh)
        if found:
            return found
        for path, s in leaves:
            try:
                mesh.local_shape(s.shape, self.spec(*s.axes), path)
            except ValueError as error:
                odd = [
                    a
                    for n, a in zip(s.shape, s.axes, strict=True)
                    if a in PADDABLE and n % mesh.size(self[a])
                ]
                hint = f"; pad(specs, mesh, rules) enlarges {odd[0]}" if odd else ""
                found.append(f"{error}{hint}")
        return [
            *found,
            *_token_laws(self),
            *_disjoint_laws(self),
            *_stage_laws(self, leaves, mesh),
            *_head_laws(self, leaves, mesh),
            *_output_laws(self),
            *_vocabulary_laws(self, leaves),
        ]

    def explain(self, specs: Any, mesh: Mesh) -> str:
        """A table: each leaf's axes, layout, local shape, copies and bytes a rank; layers that are
        alike in one row.
        """
        return explain(self, specs, mesh)


def pad(specs: Any, mesh: Mesh, rules: Rules) -> Any:
    """The specs with vocab_in, vocab_out and experts grown to a multiple of the ranks that share
    them.

    The size before is kept in `true_shape`, shown by `explain`; padding holds zeros, and layers
    mask it by config.
    """

    def grow(s: ParamSpec) -> ParamSpec:
        shape = tuple(
            -(-n // mesh.size(rules[a])) * mesh.size(rules[a]) if a in PADDABLE else n
            for n, a in zip(s.shape, s.axes, strict=True)
        )
        return (
            s if shape == s.shape else replace(s, shape=shape, true_shape=s.true_shape or s.shape)
        )

    return tree_map(grow, specs, is_leaf=is_spec)


def token_multiple(rules: Rules, mesh: Mesh) -> int:
    """What the number of tokens of one requests group must be a multiple of, so that every token
    layout divides it.
    """
    token_axes = ("tokens", *TOKEN_AXES, "o_tokens")
    return math.lcm(*(mesh.size(drop(rules[a], rules["requests"])) for a in token_axes))


def _unknown_names(rules: Rules, specs: list[ParamSpec], mesh: Mesh) -> list[str]:
    used = {a for s in specs for a in s.axes if a is not None}
    used |= {a for s in specs if s.member is not None for a in names(s.member.axis)}
    found = [
        f"no rule for logical axis {a!r}{suggest(a, rules)}" for a in sorted(used) if a not in rules
    ]
    for name, axis in rules.items():
        for a in names(axis):
            if a not in mesh.names:
                found.append(
                    f"rule {name}={axis!r}: {mesh!r} has no axis {a!r}{suggest(a, mesh.names)}"
                )
        if name in NEVER_SHARDED and names(axis):
            found.append(f"rule {name}={axis!r}: {name} is never sharded; use None")
        if name not in LIBRARY_AXES and name not in used:
            hint = suggest(name, LIBRARY_AXES)
            if "did you mean" in hint:
                found.append(f"rule {name}={axis!r} names an axis that no spec uses{hint}")
    return found


def _token_laws(rules: Rules) -> list[str]:
    found = []
    requests, tokens = rules["requests"], rules["tokens"]
    if not extends(tokens, requests):
        found.append(f"tokens={tokens!r} must extend requests={requests!r} at its minor end")
    for name in TOKEN_AXES[:2]:
        if not extends(rules[name], tokens):
            found.append(f"{name}={rules[name]!r} must extend tokens={tokens!r} at its minor end")
    residual = rules["residual_tokens"]
    for name in TOKEN_AXES[1:]:
        if not (extends(rules[name], residual) or extends(residual, rules[name])):
            found.append(
                f"{name}={rules[name]!r} and residual_tokens={residual!r} must be on one chain:"
                f" one extends the other at its minor end"
            )
    if rules["pages"] != requests:
        found.append(
            f"pages={rules['pages']!r} must equal requests={requests!r}:"
            f" a request's pages live with it"
        )
    return found


def _disjoint_laws(rules: Rules) -> list[str]:
    """Pairs of axes that meet on one tensor, or whose ranks would sum or write what they should
    not.
    """
    pairs = (
        ("page_tokens", "requests"),
        ("page_tokens", "kv_heads"),
        ("index_page_tokens", "requests"),
        ("kv_heads", "tokens"),
        ("heads", "q_tokens"),
        ("o_heads", "o_tokens"),
        ("expert_mlp", "moe_tokens"),
        ("expert_mlp", "experts"),
        ("linear_heads", "linear_tokens"),
        ("logits", "requests"),
    )
    return [
        f"{a}={rules[a]!r} and {b}={rules[b]!r} share {shared!r}: they must be disjoint"
        for a, b in pairs
        if (shared := both(rules[a], rules[b]))
    ]


def _stage_laws(rules: Rules, leaves: list[tuple[str, ParamSpec]], mesh: Mesh) -> list[str]:
    """Pipeline stages differ in what they run, so they can share no other work."""
    layers = rules["layers"]
    found = [
        f"layers={layers!r} and {name}={rules[name]!r} share {shared!r}: the axes of layers are"
        f" those of the pipeline's stages alone"
        for name in rules
        if name != "layers" and (shared := both(layers, rules[name]))
    ]
    lists = {(s.member.axis, s.member.count) for _, s in leaves if s.member is not None}
    for axis, count in sorted(lists, key=str):
        over = join_axes(*(rules[a] for a in names(axis)))
        if mesh.size(over) > count:
            found.append(
                f"{axis}={over!r} makes {mesh.size(over)} stages of a list of {count}: each stage"
                f" needs an entry, so give it at most {count} ranks"
            )
    return found


def _head_laws(rules: Rules, leaves: list[tuple[str, ParamSpec]], mesh: Mesh) -> list[str]:
    found = []
    heads, kv_heads, page_tokens = rules["heads"], rules["kv_heads"], rules["page_tokens"]
    stay = drop(heads, page_tokens)
    if not extends(heads, stay):
        found.append(f"page_tokens={page_tokens!r} must be the minor axes of heads={heads!r}")
    if not extends(stay, kv_heads):
        found.append(f"heads={heads!r} must start with the axes of kv_heads={kv_heads!r}")
    counts = {n for _, s in leaves for n, a in zip(s.shape, s.axes, strict=True) if a == "kv_heads"}
    copies = drop(stay, kv_heads)
    if mesh.size(copies) > 1 and counts and max(counts) > mesh.size(kv_heads):
        found.append(
            f"heads={heads!r} is finer than kv_heads={kv_heads!r} by {copies!r}, which copies KV"
            f" heads; that needs one whole KV head a rank,"
            f" but {max(counts)} heads lie on {mesh.size(kv_heads)}:"
            f" give kv_heads {max(counts)} ranks, or put {copies!r} into page_tokens"
        )
    return found


def _output_laws(rules: Rules) -> list[str]:
    """The way of attention's output: (q_tokens, heads), (o_tokens, o_heads), residual_tokens."""
    q, o, residual = rules["q_tokens"], rules["o_tokens"], rules["residual_tokens"]
    heads, o_heads = rules["heads"], rules["o_heads"]
    if both(q, heads) or both(o, o_heads) or not (extends(q, residual) or extends(residual, q)):
        return []  # another law is broken already
    try:
        moves(P(q, heads), P(o, o_heads))
    except ValueError as error:
        return [f"o_heads={o_heads!r} can't be reached from heads={heads!r}: {error}"]
    # A token's number has a digit for each axis. `open_digits` are those that its rank does not
    # fix, in the order in which it lists its tokens; an axis that arrives must fix the first.
    final = longer(q, residual)
    open_digits = [*names(drop(q, o)), *names(drop(final, q))]
    arriving = [*names(drop(o, q)), *names(drop(final, o))]
    if open_digits != arriving:
        return [
            f"o_tokens={o!r}: tokens would come back from o_proj in another order than {final!r}"
            f" (the finer of q_tokens and residual_tokens), because axes arrive as {arriving} where"
            f" {open_digits} is needed; what o_tokens adds to q_tokens={q!r} must be what {final!r}"
            f" adds first"
        ]
    return []


def _vocabulary_laws(rules: Rules, leaves: list[tuple[str, ParamSpec]]) -> list[str]:
    axes = {a for _, s in leaves for a in s.axes}
    vocab, requests, logits = rules["vocab_out"], rules["requests"], rules["logits"]
    found = []
    if "vocab_in" in axes and "vocab_out" not in axes and rules["vocab_in"] != vocab:
        found.append(
            f"the head is tied to the embedding, so vocab_in={rules['vocab_in']!r} must equal"
            f" vocab_out={vocab!r}"
        )
    if logits not in (None, drop(vocab, requests)):
        found.append(
            f"logits={logits!r} must be None or vocab_out less requests, here"
            f" {drop(vocab, requests)!r}"
        )
        return found
    try:
        moves(P(drop(requests, vocab), vocab), P(requests, logits))
    except ValueError as error:
        found.append(f"vocab_out={vocab!r} does not let logits return to their requests: {error}")
    return found
