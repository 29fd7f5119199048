"""The decisions of sagas: actions and undos, definitions, blocked sagas, and what people see."""
