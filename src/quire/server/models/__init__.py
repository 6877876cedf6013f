"""One server for several models: a process for each loaded one, requests sent to it by the model's name."""
