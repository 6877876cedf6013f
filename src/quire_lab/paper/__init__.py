"""Figures of the paper's evaluation, simulated: tables, plots and a report. No torch."""
