"""Two streams over time, as an SVG."""

from __future__ import annotations

from scripts.pair_bench.streams import Stream

WIDTH, HEIGHT = 900, 300
COLOURS = ("#1f6feb", "#d4731e")


def plot(first: Stream, second: Stream) -> str:
    """Tokens per second of both streams."""
    start_s = first.token_s[0]
    end_s = max(first.token_s[-1], second.token_s[-1])
    step_s = max((end_s - start_s) / 90, 1e-3)
    curves = []
    peak = 1e-9
    for stream in (first, second):
        counts = [0] * (int((end_s - start_s) / step_s) + 1)
        for when in stream.token_s:
            counts[int((when - start_s) / step_s)] += 1
        curves.append([count / step_s for count in counts])
        peak = max(peak, *curves[-1])
    lines = []
    for curve, colour in zip(curves, COLOURS, strict=True):
        points = " ".join(
            f"{60 + i * (WIDTH - 80) / len(curve):.1f},{HEIGHT - 30 - rate / peak * (HEIGHT - 60):.1f}" for i, rate in enumerate(curve)
        )
        lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>')
    mark = 60 + (second.sent_s - start_s) / (end_s - start_s) * (WIDTH - 80)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<text x="8" y="20">{peak:.0f} tok/s</text><text x="8" y="{HEIGHT - 30}">0</text>',
            f'<text x="{WIDTH - 70}" y="{HEIGHT - 8}">{end_s - start_s:.1f} s</text>',
            f'<line x1="{mark:.1f}" x2="{mark:.1f}" y1="25" y2="{HEIGHT - 30}" stroke="#888" stroke-dasharray="4"/>',
            f'<text x="{mark + 4:.1f}" y="36">second request</text>',
            f'<text x="60" y="14" fill="{COLOURS[0]}">first stream</text><text x="160" y="14" fill="{COLOURS[1]}">second stream</text>',
            *lines,
            "</svg>\n",
        ]
    )
