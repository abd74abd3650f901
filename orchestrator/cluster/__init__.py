"""Files that describe Ray clusters: their kinds, checks before they are created, and starting and ending them.

``kinds`` recognises files; ``check`` finds errors before anything is created; ``drive`` calls the tool of the file
(``ray``, ``kubectl``, ``sbatch``); ``watch`` and ``leave`` run on the nodes, and tell Ray when one of them is about to
be taken away.
"""
