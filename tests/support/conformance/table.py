"""The README's table of what was seen to be right, made of the suite's own results.

    PYTHONPATH=tests python -m support.conformance.table DIR

takes the results of DIR into ``results/``, where a file has those of one device and one
version of vLLM, and writes the table anew. Without DIR it only writes the table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[3] / "README.md"
BEGIN, END = "<!-- conformance: made by tests -->", "<!-- end of conformance -->"
# What people call the kinds of ``tiny_configs``.
MODELS = {
    "qwen3": "Qwen3",
    "qwen3_tied": "Qwen3, tied",
    "qwen3_wide": "Qwen3",
    "qwen2": "Qwen2, tied",
    "llama": "Llama",
    "gemma3": "Gemma3",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_moe_wide": "Qwen3-MoE",
    "glm4_moe": "GLM4-MoE",
    "deepseek_v3": "DeepSeek-V3",
    "qwen3_next": "Qwen3-Next",
    "mamba2": "Mamba2",
    "qwen2_vl": "Qwen2-VL, text",
    "paligemma": "PaliGemma, text",
}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_PLACE = ("device", "vllm")
_KEY = ("mode", "dtype", "model")


def take(folder: Path) -> None:
    """Take the results of a folder into those that are kept; a row's newest one counts."""
    RESULTS.mkdir(exist_ok=True)
    for path in sorted(folder.glob("*.json")):
        line = json.loads(path.read_text())
        # It says more of the machine than of the row.
        line.pop("seconds", None)
        kept = RESULTS / f"{line['device'].lower().replace(' ', '-')}-{line['vllm']}.json"
        old = json.loads(kept.read_text()) if kept.exists() else []
        lines = {_of(one, _KEY): one for one in [*old, line]}
        text = ",\n".join(json.dumps(lines[key], sort_keys=True) for key in sorted(lines))
        kept.write_text(f"[\n{text}\n]\n")


def results() -> list[Line]:
    """Return every line that is kept."""
    files = sorted(RESULTS.glob("*.json"))
    return [line for path in files for line in json.loads(path.read_text())]


def table(lines: Iterable[Line]) -> str:
    """Return Markdown: a row for models that came to the same, and the reasons below."""
    lines = list(lines)
    places = sorted({_of(line, _PLACE) for line in lines})
    found = {(_of(line, _KEY), _of(line, _PLACE)): line for line in lines}
    reasons: list[str] = []
    grouped: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for key in sorted({_of(line, _KEY) for line in lines}, key=_order):
        cells = tuple(_cell(found.get((key, place)), reasons) for place in places)
        mode, dtype, model = key
        grouped.setdefault((mode, _DTYPES[dtype], cells), []).append(MODELS[model])
    titles = [f"{device}, vLLM {version}" for device, version in places]
    rows = [
        ["engine", "dtype", "models", *titles],
        ["---"] * (3 + len(titles)),
        *(
            [mode, dtype, "; ".join(dict.fromkeys(models)), *cells]
            for (mode, dtype, cells), models in grouped.items()
        ),
    ]
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    notes = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    return f"{text}\n" + (f"\n{notes}\n" if notes else "")


def in_readme(text: str) -> str:
    """Return what a README's text has between the marks."""
    return text.partition(BEGIN)[2].partition(END)[0].strip("\n")


def main() -> None:
    """Take results, if a folder is named, and write the table."""
    for folder in sys.argv[1:]:
        take(Path(folder))
    text = README.read_text()
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    README.write_text(f"{head}{BEGIN}\n\n{table(results())}\n{END}{tail}")


def _of(line: Line, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(line[name] for name in names)


def _order(key: tuple[str, ...]) -> tuple[Any, ...]:
    mode, dtype, model = key
    return (mode != "plain", mode, list(_DTYPES).index(dtype), list(MODELS).index(model))


def _cell(line: Line | None, reasons: list[str]) -> str:
    """Return one result, with the number of its reason; the first part of that says enough."""
    if line is None:
        return ""
    if not line["reason"]:
        return str(line["result"])
    reason = line["reason"].partition("; ")[0].replace("|", "/")[:200]
    if reason not in reasons:
        reasons.append(reason)
    return f"{line['result']} ({reasons.index(reason) + 1})"


if __name__ == "__main__":
    main()
