package api

import (
	"net/http"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/batch"
)

// An object is a part of the document.
type object = map[string]any

// document returns the OpenAPI document of the routes.
func (a *API) document() object {
	schemas := object{}
	problem := object{"description": "What is wrong, and what to do.", "content": object{"application/problem+json": object{"schema": schemaOf(reflect.TypeFor[problemBody](), schemas)}}}
	paths := object{
		"/api/openapi.json": object{"get": object{
			"operationId": "getDocument", "summary": "This document.",
			"responses": object{"200": object{"description": "OpenAPI 3.1", "content": object{"application/json": object{"schema": object{"type": "object"}}}}},
		}},
	}
	for _, route := range a.routes() {
		item, _ := paths[route.Path].(object)
		if item == nil {
			item = object{}
			paths[route.Path] = item
		}
		operation := object{
			"operationId": route.ID, "summary": route.Summary, "parameters": parameters(route),
			"responses": object{
				strconv.Itoa(max(route.Status, http.StatusOK)): object{"description": "Done.", "content": object{"application/json": object{"schema": schemaOf(reflect.TypeOf(route.Answer), schemas)}}},
				"default": problem,
			},
		}
		if route.Request != nil {
			operation["requestBody"] = object{"required": true, "content": object{"application/json": object{"schema": schemaOf(reflect.TypeOf(route.Request), schemas)}}}
		}
		item[strings.ToLower(route.Method)] = operation
	}
	return object{
		"openapi": "3.1.0",
		"info": object{
			"title": "outbox-relay", "version": a.version,
			"description": "What an operator asks of a relay, and does. Fields are added, never renamed or removed. Large numbers that name something are strings.",
		},
		"servers":  []object{{"url": "/"}},
		"security": []object{{"token": []string{}}, {"basic": []string{}}, {}},
		"paths":    paths,
		"components": object{"schemas": schemas, "securitySchemes": object{
			"token": object{"type": "http", "scheme": "bearer", "description": "admin.token, or admin.read_token to read."},
			"basic": object{"type": "http", "scheme": "basic", "description": "Any name, which the audit records, and a token as the password."},
		}},
	}
}

var pathParameter = regexp.MustCompile(`\{(\w+)\}`)

func parameters(route route) []object {
	all := []object{}
	for _, match := range pathParameter.FindAllStringSubmatch(route.Path, -1) {
		all = append(all, object{"name": match[1], "in": "path", "required": true, "schema": object{"type": "string"}})
	}
	for _, name := range route.Query {
		all = append(all, object{"name": name, "in": "query", "required": false, "schema": object{"type": "string"}})
	}
	return all
}

// schemaOf returns the JSON Schema of what encoding/json writes of a type. Structs with a name go
// into named and are referred to.
func schemaOf(t reflect.Type, named object) object {
	switch {
	case t == reflect.TypeFor[time.Time]():
		return object{"type": "string", "format": "date-time"}
	case t == reflect.TypeFor[batch.IDs]():
		return object{"type": "array", "items": object{"type": "string"}}
	case t.Kind() == reflect.Pointer:
		return object{"anyOf": []object{schemaOf(t.Elem(), named), {"type": "null"}}}
	}
	switch t.Kind() {
	case reflect.Bool:
		return object{"type": "boolean"}
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64, reflect.Uint32, reflect.Uint64:
		return object{"type": "integer"}
	case reflect.Float64:
		return object{"type": "number"}
	case reflect.Slice:
		return object{"type": "array", "items": schemaOf(t.Elem(), named)}
	case reflect.Map:
		return object{"type": "object", "additionalProperties": schemaOf(t.Elem(), named)}
	case reflect.Struct:
		name := strings.ToUpper(t.Name()[:1]) + t.Name()[1:]
		if strings.HasSuffix(t.PkgPath(), "/control") {
			name = "Control" + name
		}
		if _, known := named[name]; !known {
			named[name] = object{} // before its fields, which may refer to it
			properties, required := object{}, []string{}
			addFields(t, named, properties, &required)
			named[name] = object{"type": "object", "properties": properties, "required": required, "additionalProperties": false}
		}
		return object{"$ref": "#/components/schemas/" + name}
	default:
		return object{"type": "string"}
	}
}

// addFields adds the fields that encoding/json writes, those of embedded structs among them.
func addFields(t reflect.Type, named, properties object, required *[]string) {
	for field := range t.Fields() {
		tag, options, _ := strings.Cut(field.Tag.Get("json"), ",")
		if field.Anonymous && tag == "" {
			addFields(field.Type, named, properties, required)
			continue
		}
		if tag == "-" || !field.IsExported() {
			continue
		}
		if tag == "" {
			tag = field.Name
		}
		list := strings.Split(options, ",")
		schema := schemaOf(field.Type, named)
		if slices.Contains(list, "string") {
			schema = object{"type": "string"}
			if field.Type.Kind() == reflect.Pointer {
				schema = object{"anyOf": []object{{"type": "string"}, {"type": "null"}}}
			}
		}
		properties[tag] = schema
		if !slices.Contains(list, "omitempty") && !slices.Contains(list, "omitzero") {
			*required = append(*required, tag)
		}
	}
}
