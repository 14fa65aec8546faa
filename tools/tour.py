"""Run the cells of docs/tour.ipynb in order, in a fresh namespace, and write their output into the notebook.

    python tools/tour.py               # a minute on a CPU; it needs the extras megatron and demo
    python tools/tour.py --page FILE   # write the notebook as a Markdown page; runs nothing

A notebook is JSON, so no Jupyter is needed. The output of a cell is its printed text, and the figures that stay open.
"""

import argparse
import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tour.ipynb"
Json = dict[str, Any]


def code_cells(notebook: Json) -> list[Json]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: Json) -> None:
    """Run the code cells and replace their outputs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.close("all")
    namespace: Json = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), 1):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("".join(cell["source"]), f"cell {number} of the tour", "exec"), namespace)
        text = {"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(keepends=True)}
        cell["execution_count"], cell["outputs"] = number, [text] if text["text"] else []
        for figure in map(pyplot.figure, pyplot.get_fignums()):
            figure.savefig(png := io.BytesIO(), dpi=72, metadata={"Software": None})
            picture = {"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": ["<Figure>"]}
            cell["outputs"].append({"output_type": "display_data", "metadata": {}, "data": picture})
        pyplot.close("all")


def page(notebook: Json) -> str:
    """The notebook as Markdown, with its pictures inside."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text'])}```")
            else:
                parts.append(f"![figure](data:image/png;base64,{output['data']['image/png']})")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=NOTEBOOK, help="File for the notebook; default: in place.")
    parser.add_argument("--page", type=Path, help="File for the Markdown page.")
    options = parser.parse_args()
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    if options.page is not None:
        options.page.write_text(page(notebook), encoding="utf-8")
        return
    run(notebook)
    options.out.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
