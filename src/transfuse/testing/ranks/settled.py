"""The last module that the fork server imports: from here on, collections of garbage pass over what has been imported.

In a fork they would write to each page of it, and so copy it.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
