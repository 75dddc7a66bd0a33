"""The site: `./start docs` builds it. Pages are Markdown (MyST), notebooks are run, numbers come from results/."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT / "src")]
# The notebooks run in processes of their own: they must find this source tree, and need one thread and no GPU.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}

from anchorhold.version import __version__  # noqa: E402

project = "Anchorhold"
author = "the Anchorhold maintainers"
copyright = "the Anchorhold maintainers, Apache-2.0"
version = release = __version__
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "_ext.numbers",
    "_ext.links",
    "_ext.changelog",
    "_ext.typed",
    "_ext.notebooks",
]
repository_url = "https://github.com/anchorhold/anchorhold"
repository_branch = "main"
exclude_patterns = ["_build", "**.ipynb_checkpoints", "pictures/*.py"]

# Pages
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["mystnb.unknown_mime_type"]
highlight_language = "text"

# Notebooks: run once for each change of their cells; an error in a cell is an error of the build
nb_execution_mode = "cache"
nb_execution_in_temp = True  # they write folders
nb_execution_timeout = 60  # seconds of a cell; _ext.notebooks allows a whole notebook as much
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True

# Reference
default_role = "code"  # docstrings write `name` as Markdown does
add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # 8 / 255, not 0.031372549
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
python_display_short_literal_types = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# Looks
html_theme = "furo"
html_title = f"Anchorhold {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "source_repository": repository_url,
    "source_branch": repository_branch,
    "source_directory": "docs/",
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#1b5e8c", "color-brand-content": "#1b5e8c"},
    "dark_css_variables": {"color-brand-primary": "#7cc0ee", "color-brand-content": "#7cc0ee"},
}
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True
