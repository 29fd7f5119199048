"""How fast is coatcheck, compared with another library and with the bare floor?

One module per benchmark (`memory`, `sqlite`, `postgres`, `redis`, `http`, …); `suite` lists them.
Each makes contenders, lets `measuring` run them in turn, and returns a table of `report`. Every
figure was measured in the run that prints it.
"""
