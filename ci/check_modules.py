"""Two rules for every module: it imports what its distribution declares, and it has `__all__`.

What a distribution's dependencies bring may be imported anywhere in it; what an extra brings, in
functions alone; Triton, which torch's GPU builds bring, in a folder `kernels`. (That vendor
libraries are imported in `_vendor` alone is a contract for import-linter, in pyproject.toml.)
Private modules need no `__all__`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from repository import ROOT, Distribution, distributions

__all__ = ["main"]

MODULES_OF = {
    "amd-aiter": {"aiter"},
    "flash-attn": {"flash_attn"},
    "flash-attn-4": {"flash_attn"},
    "flashinfer-python": {"flashinfer"},
    "sgl-flash-mla": {"flash_mla"},
    "tokenspeed-flashmla": {"flash_mla"},
    "tokenspeed-fa3": {"flash_attn_3", "flash_attn_interface", "fa3_fwd_config"},
    "vllm-xpu-kernels": {"vllm_xpu_kernels"},
}
"""Import names of the distributions whose import name is not their own."""

Imported = tuple[int, str, bool]
"""A line, a top-level module, and whether the import is inside a function."""


def main() -> int:
    """Print what breaks a rule; 1 if something does."""
    problems = [problem for dist in distributions() for problem in broken_rules(dist)]
    print("\n".join(problems) or "every module imports what is declared, and has __all__")
    return int(bool(problems))


def broken_rules(dist: Distribution) -> Iterator[str]:
    """What in this distribution breaks a rule, one line each."""
    always = modules_of(dist.project["dependencies"]) | {dist.package.name}
    extras = dist.project.get("optional-dependencies", {}).values()
    optional = {name for extra in extras for name in modules_of(extra)}
    for path in dist.modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        where = path.relative_to(ROOT)
        at_hand = always | sys.stdlib_module_names | brought_by_torch(path)
        for line, name, is_deferred in imports(tree):
            if name in at_hand or (is_deferred and name in optional):
                continue
            yield f"{where}:{line}: imports {name}, which {verdict(name in optional, dist)}"
        if is_public(path) and not has_all(tree):
            yield f"{where}: a public module without __all__"


def brought_by_torch(path: Path) -> set[str]:
    """What this module may import although its distribution does not ask for it."""
    return {"triton"} if path.parent.name == "kernels" else set()


def verdict(is_optional: bool, dist: Distribution) -> str:
    """Why a module may not be imported here, and what to do."""
    if is_optional:
        return f"an extra of {dist.name} brings: import it inside a function"
    return f"{dist.name} does not declare: add it to the dependencies in its pyproject.toml"


def modules_of(requirements: list[str]) -> set[str]:
    """The import names that these requirements bring."""
    names = [re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0] for requirement in requirements]
    return {module for name in names for module in MODULES_OF.get(name, {name.replace("-", "_")})}


def imports(tree: ast.Module) -> Iterator[Imported]:
    """Every import in the module, those for the type checker alone included."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    inside = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, functions)
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0], id(node) in inside
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.lineno, node.module.split(".")[0], id(node) in inside


def is_public(path: Path) -> bool:
    """No part of the module's name, from the package on, starts with an underscore."""
    parts = path.with_suffix("").relative_to(ROOT).parts
    inside = parts[parts.index("src") + 1 :]
    return not any(part.startswith("_") and part != "__init__" for part in inside)


def has_all(tree: ast.Module) -> bool:
    """The module assigns `__all__`, or holds nothing but a docstring."""
    targets = [
        target
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    return any(isinstance(name, ast.Name) and name.id == "__all__" for name in targets) or not any(
        not isinstance(node, ast.Expr) for node in tree.body
    )


if __name__ == "__main__":
    sys.exit(main())
