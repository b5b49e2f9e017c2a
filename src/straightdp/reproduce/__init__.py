"""The paper's tables, run and shown: an experiment file says which rows there are, a row is one run for each seed.

What a row runs identifies it, not the table that shows it: tables that share rows share their runs and figures. Runs
pin their noise, so `replay` calls them not releasable; audits need not, since they release nothing. Figures are
measured on private records without noise, so they are kept in OUT/private unless another folder is named.
"""
