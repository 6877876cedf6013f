"""Loading of draft models. A room: `loading` is its door."""
