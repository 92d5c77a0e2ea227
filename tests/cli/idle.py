"""An application that declares no function."""

import durable

nothing = durable.Registry("nothing")
