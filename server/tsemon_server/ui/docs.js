// The routes, as the service describes them, with a form to try each.

window.SwaggerUIBundle({ url: "openapi.json", domNode: document.getElementById("api"), deepLinking: true, validatorUrl: null });
