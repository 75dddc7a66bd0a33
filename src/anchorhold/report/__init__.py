"""From runs and audits to what a person reads.

collect    the runs and audits that lie in folders
methods    what a run's defence is called in the papers' tables
tables     one table, as text for the terminal, Markdown or CSV
compare    runs side by side: a line each, a matrix of two settings, entanglement
plots      curves of several runs in one figure, and scores against a setting (matplotlib, an extra)
samplers   how hard the triplets of each sampler are
"""
