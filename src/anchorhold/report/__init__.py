"""Tables, plots and pages from the files of runs and audits. Loads without torch."""
