"""The commands of ``kvlockstep``, one a file; each parses its arguments, calls one part, and prints what came of it.

``cli.py`` puts them together, and ``exits.py`` has how they end. Shared by several: ``options.py``, ``out_file.py``,
``look.py`` (of those that run a stored trace), ``chosen.py`` (from FILE and options to what is run), ``campaign.py``
(what ``fuzz --for`` and ``gate`` are asked and print; on Ray, ``on_ray.py``).
"""
