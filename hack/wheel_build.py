"""Hatchling's hook for wheels: compiles the native kernels, packs documents, and the page's dashboards and charts."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parent))  # Hatchling loads this file alone.

import docs_build
import native_build
import page_build


class Wheel(BuildHookInterface[Any]):
    """What is in a wheel and not in the tree as it is there."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make and fetch before the build; a wheel with kernels is for one platform, one without them for all."""
        self._kernels(build_data, is_editable=version == "editable")
        self._page(build_data, is_editable=version == "editable")
        if version != "editable":  # There the tree is around the code.
            root = Path(self.root)
            included = {str(root / page): f"kvstrata_client/pages/{page}" for page in docs_build.packed(root)}
            build_data["force_include"].update(included)

    def _kernels(self, build_data: dict[str, Any], *, is_editable: bool) -> None:
        sources = Path(self.root, native_build.PACKAGE)
        if is_editable:
            self._tell("native kernels", native_build.compile_kernels(sources, sources / native_build.LIBRARY))
            return
        self._made = tempfile.TemporaryDirectory(prefix="kvstrata-native-")
        library = Path(self._made.name, native_build.LIBRARY)
        failure = native_build.compile_kernels(sources, library)
        if failure is not None and os.environ.get(native_build.PLATFORM):
            raise RuntimeError(f"no native kernels for {os.environ[native_build.PLATFORM]}: {failure}")
        self._tell("native kernels", failure)
        if failure is None:
            build_data["force_include"][str(library)] = f"{native_build.PACKAGE.name}/{native_build.LIBRARY}"
            build_data["pure_python"] = False
            build_data["tag"] = native_build.wheel_tag()

    def _page(self, build_data: dict[str, Any], *, is_editable: bool) -> None:
        fetched = Path(self.root, page_build.PAGE)
        if not page_build.is_there(fetched):
            self._tell("the chart library of `kvstrata ui`", page_build.fetch(fetched))
        if is_editable:
            return
        included = build_data["force_include"]
        for path in sorted(Path(self.root, "dashboards").glob("*.json")):
            included[str(path)] = f"kvstrata_ui/dashboards/{path.name}"
        for path in sorted(fetched.glob("*")):  # Git ignores them, and so does hatchling.
            included[str(path)] = f"kvstrata_ui/page/vendor/{path.name}"

    def _tell(self, what: str, failure: str | None) -> None:
        if failure is not None:
            self.app.display_warning(f"{what} is left out: {failure}")
