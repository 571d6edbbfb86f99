"""Random programs against eager: what ``python -m tests.fuzz`` runs.

    python -m tests.fuzz --minutes 10 --seed 1                       # as many programs as fit
    python -m tests.fuzz --programs 10000 --seed 2 --device cuda     # so many
    python -m tests.fuzz --minutes 10 --seed 3 --captured            # every graph replayed as a CUDA graph
    python -m tests.fuzz --seed 2 --only 137                         # one of them again, printed
    python -m tests.fuzz --text tests/fuzz/found/some_case.py        # a program from its text

A program (``program.py``) is a few lines of plain PyTorch. ``generate.py`` grows it statement by statement, out of the op table
and of templates, by running every statement in eager; a few programs are over long rows (``long_rows.py``). ``subject.py``
compiles and runs it, ``oracle.py`` says whether a difference from eager is one that rounding can explain, for which
``noise.py`` runs eager with rounding errors of its own. What fails is made smaller (``shrink.py``) and printed as a file for
``found/``, which ``test_found.py`` runs from then on.
"""
