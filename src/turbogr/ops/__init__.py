"""Operators: one folder each, with a public function, a readable reference and faster backends that agree with it."""
