"""The template's own tools: scripts. From the root of the repository, others import them as `tools.NAME`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # where a script, too, finds the module that all of them share: `facts`
