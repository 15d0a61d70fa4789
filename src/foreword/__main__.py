"""`python -m foreword`: the same as the command `foreword`."""

import sys

from foreword.cli import main

sys.exit(main())
