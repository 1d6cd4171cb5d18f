"""Holds the sources in a wheel of SGLang against what the plug-in relies on; nothing of them is imported.

Functions that need no kernel can be run one by one.
"""

from __future__ import annotations

import ast
import functools
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhfspec_mega.rollout.sglang_engine.seams import Seam

Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Sources:
    """The Python files of a wheel, some of them replaced."""

    def __init__(self, wheel: Path, replaced: dict[str, str] | None = None) -> None:
        self._wheel, self._replaced = wheel, replaced or {}

    def text(self, module: str) -> str | None:
        """None where the wheel has no such module."""
        if module in self._replaced:
            return self._replaced[module]
        return _read(self._wheel, module)

    def fault(self, seam: Seam) -> str | None:
        """What of a seam is not there; None if all is."""
        text = self.text(seam.module)
        if text is None:
            return f"no module {seam.module}"
        node = _find(_parse(text), seam.name.split("."))
        if node is None:
            return f"no {seam.target}"
        if isinstance(node, ast.ClassDef):
            given: tuple[str, ...] = ()
        else:
            given = tuple(argument.arg for argument in (*node.args.posonlyargs, *node.args.args))
        if given[: len(seam.parameters)] != seam.parameters:
            return f"{seam.target} takes {given}"
        known = set(_words(node))
        missing = [name for name in seam.attributes if name not in known]
        return f"{seam.target} does not speak of {missing}" if missing else None

    def functions(self, module: str, names: Sequence[str], known: dict[str, Any]) -> dict[str, Any]:
        """These functions of a module, without their decorators, over the names that they need."""
        text, found = self.text(module), dict(known)
        assert text is not None
        for name in names:
            node = _find(_parse(text), [name])
            assert isinstance(node, ast.FunctionDef), name
            bare = ast.FunctionDef(**{field: getattr(node, field, None) for field in node._fields})
            bare.decorator_list = []
            module_node = ast.fix_missing_locations(ast.Module([ast.copy_location(bare, node)], []))
            exec(compile("from __future__ import annotations\n" + ast.unparse(module_node), module, "exec"), found)
        return found


@functools.cache
def _read(wheel: Path, module: str) -> str | None:
    name = module.replace(".", "/")
    with zipfile.ZipFile(wheel) as archive:
        for path in (f"{name}.py", f"{name}/__init__.py"):
            if path in archive.namelist():
                return archive.read(path).decode()
    return None


@functools.lru_cache(maxsize=4)  # syntax trees are millions of objects, at which the collector looks again and again
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def _find(node: ast.AST, names: list[str]) -> Node | None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Node) and child.name == names[0]:
            return child if len(names) == 1 else _find(child, names[1:])
    return None


def _words(node: ast.AST) -> Iterator[str]:
    """Identifiers, and strings, which may name attributes."""
    for part in ast.walk(node):
        for field in ("id", "attr", "arg", "name"):
            if isinstance(word := getattr(part, field, None), str):
                yield word
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
