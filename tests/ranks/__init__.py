"""Multi-rank test jobs on the CPU, without paying Megatron's import time in every process.

:class:`RankPool` keeps one process that has imported torch and Megatron and turned CPU mode on. For each
job it forks as many ranks as are asked for; every rank therefore starts from the same clean state, and no
job sees what another left behind.
"""
