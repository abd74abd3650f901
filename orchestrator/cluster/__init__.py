"""Ray clusters as files: what they are, whether they would come up, and bringing them up and down.

``kinds`` tells what a file is; ``check`` collects what can be wrong with it before anything is created; ``drive``
hands it to the tool that it is written for (``ray``, ``kubectl``, ``sbatch``); ``watch`` and ``leave`` run on the
nodes, and tell Ray when one of them is about to be taken away.
"""
