"""The Python of the book runs as it is printed."""

import re
from pathlib import Path

import elapid

PAGE = Path(__file__).parents[3] / "docs/book/src/python.md"


def test_blocks_of_the_page_run_in_order(tmp_path, monkeypatch, capsys):
    code = "".join(f"def area_{n}(width, height):\n    return width * {n}\n\n" for n in range(60))
    monkeypatch.chdir(tmp_path)
    Path("src").mkdir()
    Path("src/shapes.py").write_text(code)
    elapid.scratch(code, device="cpu").save("tiny.gguf")
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    assert len(blocks) == 3
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert "bits per byte" in capsys.readouterr().out
