"""The drawings of docs/explanation: SVG text written from shapes of models, the same on every run.

    python -m tools.drawings

Writes ``docs/images/explain-*.svg``. Each drawing lies on a card of its own, light or dark as the reader's system is,
and shows by hatching and words all that it shows by colour. Bytes and operations are computed from the shape of
Qwen3-8B.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from tools.model_shapes import SHAPES

__all__ = ["FOLDER", "drawings", "write"]

FOLDER = Path(__file__).parents[1] / "docs" / "images"
WIDTH = 520
"""Width of a drawing in its own units; text is 15 of them high, so that it is readable on a telephone too."""

STYLE = """
svg { --card: #ffffff; --ink: #1f2430; --soft: #566072; --line: #9aa1ad; --one: #2f6fde; --two: #c8501f }
@media (prefers-color-scheme: dark) {
  svg { --card: #20232b; --ink: #eceef3; --soft: #aeb5c2; --line: #6d7585; --one: #7fabff; --two: #ff9a72 }
}
text { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--ink) }
.head { font-weight: 600; font-size: 17px } .bold { font-weight: 600 } .soft { fill: var(--soft) }
.card { fill: var(--card); stroke: var(--line) } .box { fill: var(--card); stroke: var(--ink); stroke-width: 1.4 }
.hatch { fill: url(#hatch); stroke: var(--one); stroke-width: 1.8 }
.dots { fill: url(#dots); stroke: var(--two); stroke-width: 1.8 }
.faint { fill: none; stroke: var(--line); stroke-width: 1.4; stroke-dasharray: 5 4 }
.plate { fill: var(--card); stroke: none }
.arrow { fill: none; stroke: var(--ink); stroke-width: 1.6; marker-end: url(#tip) }
.rule { fill: none; stroke: var(--ink); stroke-width: 1.4 } .tip { fill: var(--ink) }
.h { fill: none; stroke: var(--one); stroke-width: 1.6 } .d { fill: var(--two) }
"""
DEFS = """<defs>
<pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<path class="h" d="M0 0V8"/></pattern>
<pattern id="dots" width="8" height="8" patternUnits="userSpaceOnUse">
<circle class="d" cx="4" cy="4" r="1.5"/></pattern>
<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path class="tip" d="M0 0L8 4L0 8z"/></marker>
</defs>"""

SHAPE = SHAPES["Qwen/Qwen3-8B"]
C, LAYERS, VOCABULARY = SHAPE["hidden_size"], SHAPE["num_hidden_layers"], SHAPE["vocab_size"]
HEADS, GROUPS, D = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["head_dim"]
BF16, FP32 = 2, 4


def drawings() -> dict[str, str]:
    """Return the SVG text of every drawing, by the name of its file."""
    made = {
        "chain-rule": (chain_rule(), 318, "The backward of a layer, one chunk after the other, the last one first"),
        "attention": (attention(), 330, "Attention of a chunk: a rectangle over its prefix and a causal square"),
        "head": (head(), 392, "Labels are shifted over the whole row; logits exist for one chunk of targets"),
        "memory": (memory(), 452, "Bytes that each token takes, by what they are, and the tiers that store them"),
        "time": (time(), 446, "Work of attention with and without kept outputs, and its part of a step by length"),
        "devices": (devices(), 372, "Collectives of one layer and step under ZeRO-3: streaming and naive chunks"),
        "prefix": (prefix(), 420, "Completions of one prompt as separate rows, and as one tree"),
        "exactness": (exactness(), 340, "The error of a streamed gradient is compared with that of plain autograd"),
    }
    return {f"explain-{name}.svg": _svg(*found) for name, found in made.items()}


def write() -> None:
    """Write every drawing to :data:`FOLDER`."""
    for name, text in drawings().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


# --- the drawings -----------------------------------------------------------------------------------------------------


def chain_rule() -> list[str]:
    """Draw four chunks of one layer's backward while the third of them is processed."""
    parts = [say(18, 32, "Backward of one layer, at its second chunk", "head", "start")]
    kinds = ["faint", "faint", "hatch", "box"]
    words = [("runs 4th", "waits"), ("runs 3rd", "waits"), ("runs 2nd", "now"), ("ran 1st", "freed")]
    for i, (kind, (order, state)) in enumerate(zip(kinds, words, strict=True)):
        x = 22 + 132 * i
        middle = x + 40
        parts += [say(middle, 66, f"dL/dz({i + 1})"), arrow((middle, 74), (middle, 96))]
        parts += [box(x, 98, 80, 92, kind)]
        parts += [plate(x + 4, 106, 72, 76)] if kind == "hatch" else []
        parts += [say(middle, 124, f"chunk {i + 1}", "bold"), say(middle, 148, order), say(middle, 172, state, "soft")]
        parts += [arrow((middle, 192), (middle, 226))]
        if i < 3:
            parts += [arrow((x + 130, 152), (x + 83, 152)), say(x + 106, 143, "dK dV")]
    parts += [box(22, 228, 476, 68)]
    parts += [say(34, 256, "dL/dW: the sum of the four terms, returned once", at="start")]
    return [*parts, say(34, 282, "dL/dx: the four pieces, end to end", at="start")]


def attention() -> list[str]:
    """Draw the scores of six chunks, those of the fourth marked."""
    size, left, top, row = 37, 52, 76, 3
    parts = [say(18, 32, "Attention of one chunk of queries", "head", "start"), say(left + 111, 66, "keys", "soft")]
    parts += [f'<g transform="rotate(-90 36 {top + 111})">{say(36, top + 111, "queries", "soft")}</g>']
    parts += [f'<path class="faint" d="M{left} {top}l{6 * size} {6 * size}"/>']
    for i in range(6):
        x, y = left + size * i, top + size * i
        if i == row:
            parts += [
                box(left, y, size * i, size, "hatch"),
                f'<path class="dots" d="M{x} {y}V{y + size}H{x + size}z"/>',
            ]
        else:
            parts += [f'<path class="faint" d="M{x} {y}V{y + size}"/>']
            parts += [f'<path class="faint" d="M{left} {y + size}H{x + size}"/>'] if i + 1 not in (row, 6) else []
    parts += [box(left, top, 6 * size, 6 * size, "rule")]
    x = 306
    parts += [box(x, 84, 26, 26, "hatch"), say(x + 38, 96, "prefix: a rectangle,", at="start")]
    parts += [say(x + 38, 115, "every key is seen", "soft", "start")]
    parts += [box(x, 138, 26, 26, "dots"), say(x + 38, 150, "own keys: a square,", at="start")]
    parts += [say(x + 38, 169, "causal", "soft", "start")]
    parts += [say(x, 204, "each gives o and lse;", at="start"), say(x, 226, "merged:", at="start")]
    parts += [say(x, 250, "o = Σ exp(lseₛ - lse) oₛ", "bold", "start")]
    parts += [say(x, 282, "above the diagonal", "soft", "start"), say(x, 301, "nothing is computed", "soft", "start")]
    return parts


def head() -> list[str]:
    """Draw tokens and shifted targets of a row, and the logits that exist at a time."""
    rows, chunk = 131_072, 1024
    one, all_of_them = chunk * VOCABULARY * BF16 / 2**20, rows * VOCABULARY * BF16 / 2**30
    tokens = ["p", "p", "p", "p", "a", "b", "c", "d", "e", "f"]
    targets = ["", "", "", "a", "b", "c", "d", "e", "f", ""]
    parts = [say(18, 32, "Labels are shifted once, over the whole row", "head", "start")]
    parts += [say(96, 74, "tokens", at="end"), say(96, 118, "targets", at="end")]
    for i, (token, target) in enumerate(zip(tokens, targets, strict=True)):
        x = 108 + 39 * i
        parts += [box(x, 52, 34, 34), say(x + 17, 75, token)]
        parts += [box(x, 96, 34, 34, "hatch" if target else "faint")]
        parts += [plate(x + 7, 103, 20, 20)] if target else []
        parts += [say(x + 17, 119, target, "bold" if target else "")]
    edge = 108 + 39 * 5 - 2.5
    parts += [f'<path class="rule" stroke-dasharray="4 3" d="M{edge} 44V140"/>']
    parts += [say(edge, 158, "border of two chunks: b is not lost", "soft")]
    parts += [arrow((260, 168), (260, 196)), say(272, 188, "only positions with a target", "soft", "start")]
    parts += [box(22, 200, 476, 118, "faint"), box(22, 200, 476, 34, "hatch"), plate(62, 204, 396, 26)]
    parts += [say(260, 222, f"logits of one chunk: {chunk:,} x {VOCABULARY:,}, {one:,.0f} MiB", "bold")]
    parts += [say(260, 270, f"logits of {rows:,} targets: {all_of_them:.1f} GiB in bf16", "soft")]
    parts += [say(260, 294, "never made", "soft"), arrow((260, 320), (260, 346))]
    return [*parts, say(260, 370, "loss and its gradient, or log p of each target", "bold")]


def memory() -> list[str]:
    """Draw bars of bytes per token."""
    hidden = C * BF16
    stored = min(-(-LAYERS // size) + size - 1 for size in range(1, LAYERS + 1))
    kv = 2 * GROUPS * D * BF16
    layer = 2 * hidden + kv + 2 * GROUPS * D * FP32
    kept = LAYERS * (HEADS * D * BF16 + HEADS * FP32)
    bars = [
        ("the layer at work: dz, dx, K, V, dK, dV", layer, "dots"),
        (f"layer inputs, one level: {LAYERS} of them", LAYERS * hidden, "hatch"),
        (f"layer inputs, two levels: {stored} at a time", stored * hidden, "hatch"),
        ("if kept: keys and values of all layers", LAYERS * kv, "faint"),
        ("if kept: attention outputs of all layers", kept, "faint"),
    ]
    widest = max(size for _, size, _ in bars)
    parts = [say(18, 32, "Bytes per token, Qwen3-8B in bf16", "head", "start")]
    for i, (name, size, kind) in enumerate(bars):
        y, long = 58 + 54 * i, 350 * size / widest
        parts += [say(22, y + 8, name, at="start"), box(22, y + 15, long, 20, kind)]
        parts += [say(30 + long, y + 31, f"{size:,}", "bold", "start")]
    y = 344
    parts += [say(22, y, "A chunk's own activations do not grow with the row.", "soft", "start")]
    for i, (name, what) in enumerate((("device", "at work"), ("host", "inputs, kept"), ("disk", "inputs"))):
        x = 22 + 164 * i
        parts += [box(x, y + 20, 134, 64), say(x + 67, y + 46, name, "bold"), say(x + 67, y + 70, what, "soft")]
        parts += [both((x + 138, y + 52), (x + 160, y + 52))] if i < 2 else []
    return parts


def time() -> list[str]:
    """Draw attention's work as bars, and its part of a step over length."""
    parts = [say(18, 32, "Attention in one step, its forward = 1", "head", "start")]
    cases = [("plain autograd", 1, 0), ("checkpointing, streaming", 1, 1), ("streaming, attention kept", 1, 0)]
    for i, (name, forward, again) in enumerate(cases):
        y, unit = 56 + 56 * i, 88
        parts += [say(22, y + 8, name, at="start")]
        x = 22.0
        for word, units, kind in (("forward", forward, "box"), ("again", again, "dots"), ("backward", 2.5, "hatch")):
            if units:
                parts += [
                    box(x, y + 15, unit * units, 26, kind),
                    plate(x + unit * units / 2 - 5 * len(word), y + 18, 10 * len(word), 20),
                ]
                parts += [say(x + unit * units / 2, y + 33, word)]
                x += unit * units
        parts += [say(x + 10, y + 34, f"{forward + again + 2.5:g}", "bold", "start")]
    parts += [say(18, 258, "Attention's part of a step, Qwen3-8B", "head", "start")]
    for i, length in enumerate((4096, 16_384, 65_536, 262_144, 1_048_576)):
        y, share = 276 + 27 * i, attention_share(length)
        parts += [say(116, y + 15, f"{length:,}", at="end"), box(124, y, 320, 20, "faint")]
        parts += [box(124, y, 320 * share, 20, "hatch"), say(498, y + 15, f"{share:.0%}", "bold", "end")]
    return [*parts, say(22, 430, "tokens of a row; the rest is products of matrices", "soft", "start")]


def attention_share(length: int) -> float:
    """Return attention's part of the operations of a step whose layers are run again, without the embeddings."""
    attention = 4.5 * 2 * HEADS * D * LAYERS * length**2
    projections = C * D * (2 * HEADS + 2 * GROUPS) + 3 * C * SHAPE["intermediate_size"]
    products = 8 * LAYERS * projections * length + 6 * C * VOCABULARY * length
    return attention / (attention + products)


def devices() -> list[str]:
    """Draw the collectives of a layer's step under ZeRO-3."""

    def lane(y: int, cells: list[tuple[str, str]]) -> list[str]:
        drawn, x = [], 22.0
        for word, kind in cells:
            long = 34 if kind == "box" else 64
            drawn += [box(x, y, long, 34, kind), *([plate(x + 4, y + 7, long - 8, 20)] if kind != "box" else [])]
            drawn += [say(x + long / 2, y + 22, word)]
            x += long + 4
        return drawn

    chunks = [str(i) for i in range(1, 5)]
    streamed = [("gather", "hatch"), *((i, "box") for i in chunks)]
    backward = [("gather", "hatch"), *((i, "box") for i in reversed(chunks)), ("reduce", "dots")]
    parts = [say(18, 32, "One layer of a ZeRO-3 step, four chunks", "head", "start")]
    parts += [say(22, 62, "streaming: one autograd node for the layer", at="start")]
    parts += [*lane(72, streamed), say(254, 94, "forward", "soft", "start")]
    parts += [*lane(112, backward), say(316, 134, "backward", "soft", "start")]
    parts += [say(22, 176, "naive: forward and backward once for each chunk", at="start")]
    for i in range(4):
        y = 186 + 38 * i
        cells = [("gather", "hatch"), (chunks[i], "box"), ("gather", "hatch"), (chunks[i], "box"), ("reduce", "dots")]
        parts += lane(y, cells)
        parts += [say(316, y + 22, f"chunk {i + 1}", "soft", "start")]
    bracket = "M392 72h8V146h-8M392 188h8V336h-8"
    parts += [f'<path class="rule" d="{bracket}"/>', say(408, 114, "2 gathers,", at="start")]
    parts += [say(408, 134, "1 reduction", at="start"), say(408, 258, "8 gathers,", at="start")]
    return [*parts, say(408, 278, "4 reductions", at="start"), say(22, 360, "numbers: chunks at work", "soft", "start")]


def prefix() -> list[str]:
    """Draw two completions of one prompt as rows and as a tree."""
    prompt, completion, group = 4096, 1024, 8
    apart, shared = group * (prompt + completion), prompt - 1 + group * (completion + 1)
    parts = [say(18, 32, "Two rows, or one tree", "head", "start")]
    for i, name in enumerate(("A", "B")):
        y = 50 + 42 * i
        parts += [box(22, y, 250, 34, "hatch"), plate(112, y + 6, 70, 22), say(147, y + 23, "prompt")]
        parts += [box(274, y, 110, 34), say(329, y + 22, f"completion {name}")]
    parts += [say(396, 94, "prompt twice", "soft", "start")]
    y = 198
    parts += [box(22, y, 236, 34, "hatch"), plate(104, y + 6, 72, 22), say(140, y + 23, "trunk", "bold")]
    parts += [box(260, y, 118, 34), say(319, y + 22, "branch A"), box(380, y, 118, 34), say(439, y + 22, "branch B")]
    parts += [f'<path class="arrow" d="M319 {y - 2}C300 {y - 30} 220 {y - 30} 200 {y - 3}"/>']
    parts += [f'<path class="arrow" d="M439 {y - 2}C400 {y - 44} 120 {y - 44} 80 {y - 3}"/>']
    parts += [say(498, y - 44, "each sees trunk and itself", "soft", "end")]
    parts += [f'<path class="arrow" d="M319 {y + 36}C300 {y + 58} 220 {y + 58} 200 {y + 38}"/>']
    parts += [f'<path class="arrow" d="M439 {y + 36}C400 {y + 74} 120 {y + 74} 80 {y + 38}"/>']
    parts += [say(498, y + 88, "dK, dV of the trunk: a sum", "soft", "end")]
    parts += [say(22, 318, "A branch begins with the prompt's last token.", "soft", "start")]
    parts += [say(22, 350, f"{group} completions of {completion:,} tokens, prompt of {prompt:,}:", at="start")]
    parts += [say(22, 376, f"{apart:,} tokens as rows", at="start")]
    return [*parts, say(22, 400, f"{shared:,} tokens as a tree", "bold", "start")]


def exactness() -> list[str]:
    """Draw the truth, the errors of plain autograd and ours, and the bound."""
    x, y = 168, 188
    parts = [say(18, 32, "Three gradients of one parameter", "head", "start")]
    parts += [f'<circle class="faint" cx="{x}" cy="{y}" r="122"/><circle class="hatch" cx="{x}" cy="{y}" r="92"/>']
    parts += [f'<circle class="tip" cx="{x}" cy="{y}" r="5"/>', plate(x - 50, y + 10, 100, 24)]
    parts += [say(x, y + 28, "truth: fp64", "bold"), f'<path class="rule" d="M{x} {y}L{x - 80} {y - 46}"/>']
    parts += [f'<circle class="tip" cx="{x - 80}" cy="{y - 46}" r="5"/>']
    parts += [f'<path class="rule" d="M{x} {y}L{x + 66} {y - 58}"/>']
    parts += [f'<rect class="tip" x="{x + 61}" y="{y - 63}" width="10" height="10"/>']
    right = 318
    parts += [f'<circle class="tip" cx="{right}" cy="83" r="5"/>', say(right + 14, 88, "plain autograd", at="start")]
    parts += [f'<rect class="tip" x="{right - 5}" y="111" width="10" height="10"/>']
    parts += [say(right + 14, 121, "streamed", at="start"), say(right + 14, 141, "in the same dtype", "soft", "start")]
    parts += [box(right - 8, 166, 20, 20, "hatch"), say(right + 22, 181, "as far off as torch", at="start")]
    parts += [box(right - 8, 204, 20, 20, "faint"), say(right + 22, 219, "1.1 times that, and", at="start")]
    parts += [say(right + 22, 239, "a rounding: accepted", at="start")]
    parts += [
        f'<path class="rule" d="M{right - 4} 262l12 12m0 -12l-12 12"/>',
        say(right + 22, 273, "outside: a failure", at="start"),
    ]
    return [*parts, say(x, 334 - 8, "distance = relative error", "soft")]


# --- marks ------------------------------------------------------------------------------------------------------------


def say(x: float, y: float, words: str, kind: str = "", at: str = "middle") -> str:
    """Return a text whose baseline is at y."""
    mark = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{at}"{mark}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "box") -> str:
    """Return a rectangle in one of the styles."""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:.4g}" height="{height:g}"/>'


def plate(x: float, y: float, width: float, height: float) -> str:
    """Return ground for a text on hatching."""
    return f'<rect class="plate" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>'


def arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Return a straight arrow."""
    return f'<path class="arrow" d="M{start[0]:g} {start[1]:g}L{end[0]:g} {end[1]:g}"/>'


def both(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Return arrows in both directions between two points."""
    (x, y), (u, v) = start, end
    return arrow((x, y - 5), (u, v - 5)) + arrow((u, v + 5), (x, y + 5))


def _svg(parts: list[str], height: int, title: str) -> str:
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH * 1.25:g}" role="img">'
    )
    card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
    return "\n".join(
        [opening, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", DEFS, card, *parts, "</svg>\n"]
    )


if __name__ == "__main__":
    write()
