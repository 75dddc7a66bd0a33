"""From runs and audits to what a person reads.

collect    the runs and audits that lie in folders
methods    what a run's defence is called in the papers' tables
tables     one table, as text for the terminal, Markdown or CSV
compare    runs side by side: a line each, a matrix of two settings, entanglement
plots      curves of several runs in one figure, and scores against a setting (matplotlib, an extra)
samplers   how hard the triplets of each sampler are

page       how a page is made; templates/ holds what it looks like
charts     lines and points as inline SVG
gallery    single lists before and after an attack, with their pictures
audit_page, training_page, compare_page    the three pages
"""
