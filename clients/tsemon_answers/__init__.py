"""One definition of every question and every answer of the REST interface, imported by the server and by the client.

A class that ends in `Query` is what a question may ask: the server reads it from the query string, and the client's
methods take their arguments from it. The other classes are what the server responds with.
"""
