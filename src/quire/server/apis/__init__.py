"""HTTP routes: a package for each API, a module for each smaller group."""
