package charttest

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	strict "sigs.k8s.io/yaml"
)

const chartDir = "../helm/outbox-relay"

// minimal is what every installation must set, complete all that may be set.
const (
	minimal = `
config: {destinations: {shop: {url: "https://shop.internal/events"}}}
`
	complete = `
image: {repository: registry.internal/outbox-relay, tag: v1, pullPolicy: Always}
imagePullSecrets: [{name: registry}]
replicas: 3
database: {secret: {name: db, key: url}}
migrate: {enabled: true, roles: false, secret: {name: db, key: owner-url}}
config:
  environment: staging
  database: {schema: billing}
  destinations: {shop: {url: "https://shop.internal/events", signing_secrets: ["${SHOP_SECRET}"]}}
  traces: {endpoint: "http://collector:4318"}
secretEnv: {SHOP_SECRET: {name: shop, key: secret}}
env: {GOMEMLIMIT: 100MiB}
page: {enabled: true, port: 9998, secret: {name: page, key: token}, publicURL: "https://relay.internal:8443/outbox"}
metrics: {port: 9999, service: {enabled: true, annotations: {a: b}}, podMonitor: {enabled: true, labels: {release: prometheus}}}
resources: {limits: {memory: 128Mi}}
podDisruptionBudget: {enabled: true, maxUnavailable: 50%}
podAnnotations: {a: b}
nodeSelector: {a: b}
tolerations: [{key: a, operator: Exists}]
affinity: {podAntiAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 1, podAffinityTerm: {topologyKey: zone}}]}}
topologySpreadConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: ScheduleAnyway}]
`
)

// objects are decoded manifests, by kind.
type objects map[string]any

// add decodes one manifest into the type of its kind. A field that the type does not have is an
// error.
func (o objects) add(t *testing.T, manifest []byte) {
	t.Helper()
	var head struct{ APIVersion, Kind string }
	if err := strict.Unmarshal(manifest, &head); err != nil {
		t.Fatal(err)
	}
	types := map[string]any{
		"v1 Secret": &corev1.Secret{}, "v1 ConfigMap": &corev1.ConfigMap{}, "v1 Service": &corev1.Service{}, "apps/v1 Deployment": &appsv1.Deployment{},
		"batch/v1 Job": &batchv1.Job{}, "policy/v1 PodDisruptionBudget": &policyv1.PodDisruptionBudget{}, "monitoring.coreos.com/v1 PodMonitor": &map[string]any{},
	}
	object := types[head.APIVersion+" "+head.Kind]
	if object == nil {
		t.Fatalf("%s %s is of no known kind", head.APIVersion, head.Kind)
	}
	if err := strict.UnmarshalStrict(manifest, object); err != nil {
		t.Errorf("%s: %v\n%s", head.Kind, err, manifest)
	}
	for o[head.Kind] != nil { // a second one of a kind
		head.Kind += "+"
	}
	o[head.Kind] = object
}

// addAll decodes the documents of a file.
func (o objects) addAll(t *testing.T, text []byte) {
	t.Helper()
	documents := yaml.NewYAMLReader(newReader(text))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(bytes.TrimSpace(document)) > 0 {
			o.add(t, document)
		}
	}
}

func valuesOf(t *testing.T, text string) chartutil.Values {
	t.Helper()
	values, err := chartutil.ReadValues([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return values
}

func loadChart(t *testing.T) *chart.Chart {
	t.Helper()
	c, err := loader.Load(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// render returns the manifests of an installation, or why the values are refused.
func render(t *testing.T, text string) (objects, error) {
	t.Helper()
	c := loadChart(t)
	release := chartutil.ReleaseOptions{Name: "billing", Namespace: "default", Revision: 1, IsInstall: true}
	values, err := chartutil.ToRenderValues(c, valuesOf(t, text), release, chartutil.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(c, values)
	if err != nil {
		return nil, err
	}
	all := objects{}
	for name, text := range files {
		if strings.HasSuffix(name, ".yaml") && strings.TrimSpace(text) != "" {
			all.add(t, []byte(text))
		}
	}
	return all, nil
}

func TestChartPassesTheLinter(t *testing.T) {
	t.Parallel()
	for name, values := range map[string]string{"minimal": minimal, "complete": complete} {
		result := lint.AllWithKubeVersion(chartDir, valuesOf(t, values), "default", nil)
		for _, message := range result.Messages {
			if message.Severity > support.InfoSev {
				t.Errorf("%s: %s", name, message)
			}
		}
	}
}

func TestChartRenders(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		values string
		kinds  []string
		job    string // what it runs, in this order
	}{
		"minimal":   {minimal, []string{"ConfigMap", "Deployment", "Job", "PodDisruptionBudget", "Service", "Service+"}, "migrate up, migrate roles"},
		"complete":  {complete, []string{"ConfigMap", "Deployment", "Job", "PodDisruptionBudget", "PodMonitor", "Service", "Service+"}, "migrate up"},
		"one relay": {minimal + "replicas: 1\nmigrate: {enabled: false}\nmetrics: {service: {enabled: false}}\npage: {enabled: false}\n", []string{"ConfigMap", "Deployment"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			all, err := render(t, test.values)
			if err != nil {
				t.Fatal(err)
			}
			kinds := make([]string, 0, len(all))
			for kind := range all {
				kinds = append(kinds, kind)
			}
			if slices.Sort(kinds); !slices.Equal(kinds, test.kinds) {
				t.Errorf("%q are rendered, want %q", kinds, test.kinds)
			}
			deployment := all["Deployment"].(*appsv1.Deployment)
			checkPod(t, deployment.Spec.Template.Spec)
			checkJob(t, all, test.job)
			for key, value := range deployment.Spec.Selector.MatchLabels {
				if deployment.Spec.Template.Labels[key] != value {
					t.Errorf("the selector %s=%s does not find the pods", key, value)
				}
			}
			checkConfiguration(t, all)
		})
	}
}

// checkJob looks at what the Job runs, each command behind the one before. Its containers have the
// URL of the owner.
func checkJob(t *testing.T, all objects, want string) {
	t.Helper()
	var commands []string
	if job, made := all["Job"].(*batchv1.Job); made {
		pod := job.Spec.Template.Spec
		checkPod(t, pod)
		for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
			commands = append(commands, strings.Join(c.Args, " "))
			if c.Env[0].Name != "OUTBOX_DATABASE_URL" || c.Env[0].ValueFrom.SecretKeyRef == nil {
				t.Errorf("%s: %+v", c.Name, c.Env)
			}
		}
	}
	if got := strings.Join(commands, ", "); got != want {
		t.Errorf("the job runs %s, want %s", got, want)
	}
}

// checkPod looks for what a pod must refuse.
func checkPod(t *testing.T, pod corev1.PodSpec) {
	t.Helper()
	if pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken {
		t.Error("the pod gets a token of the API")
	}
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		checkCommand(t, c)
		security := c.SecurityContext
		switch {
		case !*pod.SecurityContext.RunAsNonRoot || *security.AllowPrivilegeEscalation || !*security.ReadOnlyRootFilesystem ||
			!slices.Contains(security.Capabilities.Drop, "ALL") || pod.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault:
			t.Errorf("%s may do too much: %+v", c.Name, security)
		case c.Resources.Limits.Memory().IsZero():
			t.Errorf("the memory of %s has no limit", c.Name)
		}
	}
}

// checkCommand asks the program whether it knows the command with all its flags: with --help it
// looks at no more.
func checkCommand(t *testing.T, c corev1.Container) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), relay(t), append(slices.Clone(c.Args), "--help")...).CombinedOutput(); err != nil {
		t.Errorf("%q: %v\n%s", c.Args, err, out)
	}
}

// checkConfiguration has the program read the file of the ConfigMap with the variables of the
// Deployment.
func checkConfiguration(t *testing.T, all objects) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "outbox-relay.yaml")
	if err := os.WriteFile(file, []byte(all["ConfigMap"].(*corev1.ConfigMap).Data["outbox-relay.yaml"]), 0o600); err != nil {
		t.Fatal(err)
	}
	container := all["Deployment"].(*appsv1.Deployment).Spec.Template.Spec.Containers[0]
	if !slices.Equal(container.Args, []string{"run", "--config", "/etc/outbox-relay/outbox-relay.yaml"}) || container.VolumeMounts[0].MountPath != "/etc/outbox-relay" {
		t.Errorf("%q does not read what is mounted at %s", container.Args, container.VolumeMounts[0].MountPath)
	}
	configCheck(t, container, func(e corev1.EnvVar) string {
		if e.Name == "OUTBOX_DATABASE_URL" {
			return "postgres://localhost/billing"
		}
		return secret
	}, "--config", file)
}

const secret = "whsec_YXJjaHRlc3QtYXJjaHRlc3QtYXJjaHRlc3Qh"

// configCheck has the program read its configuration with the variables of a container, and returns
// what it prints. inSecret returns the value of a variable that a Secret has.
func configCheck(t *testing.T, c corev1.Container, inSecret func(e corev1.EnvVar) string, flags ...string) string {
	t.Helper()
	check := exec.CommandContext(t.Context(), relay(t), append([]string{"config", "check"}, flags...)...)
	for _, e := range c.Env {
		switch {
		case e.ValueFrom != nil && e.ValueFrom.SecretKeyRef != nil:
			e.Value = inSecret(e)
		case e.ValueFrom != nil:
			e.Value = "billing-0"
		}
		check.Env = append(check.Env, e.Name+"="+e.Value)
	}
	out, err := check.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	return string(out)
}

// What cannot work is refused before anything is installed.
func TestChartRefusesValues(t *testing.T) {
	t.Parallel()
	for name, values := range map[string]string{
		"no destination":          "",
		"an unknown value":        minimal + "replica: 3\n",
		"a URL in the values":     minimal + "database: {secret: {name: a, key: b}, url: postgres://u:p@h/db}\n",
		"a URL in the file":       `config: {destinations: {shop: {url: "https://h"}}, database: {url: "postgres://u:p@h/db"}}`,
		"a listener of metrics":   `config: {destinations: {shop: {url: "https://h"}}, metrics: {listen: ":1"}}`,
		"a listener of the page":  `config: {destinations: {shop: {url: "https://h"}}, admin: {listen: ":1"}}`,
		"a digest without a hash": minimal + "image: {digest: latest}\n",
	} {
		if _, err := render(t, values); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}

func TestManifestsAreOfTheAPI(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../kubernetes.yaml")
	if err != nil {
		t.Fatal(err)
	}
	all := objects{}
	all.addAll(t, text)
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), "..")
	if err != nil {
		t.Fatal(err)
	}
	if text, err = built.AsYaml(); err != nil {
		t.Fatal(err)
	}
	kustomized := objects{}
	kustomized.addAll(t, text)
	if len(all) != 4 || len(kustomized) != len(all) {
		t.Errorf("%d kinds, and %d from the kustomization, want 4", len(all), len(kustomized))
	}
	for _, of := range []objects{all, kustomized} {
		checkSidecar(t, of)
	}
	checkJob(t, all, "migrate up, migrate roles")
	misspelt := strings.Replace(string(text), "livenessProbe:", "livenesProbe:", 1)
	if err := strict.UnmarshalStrict([]byte(misspelt[strings.Index(misspelt, "kind: Deployment")-len("apiVersion: apps/v1\n"):]), &appsv1.Deployment{}); err == nil {
		t.Error("a misspelt field is accepted")
	}
}

// checkSidecar looks at the relay beside a service.
func checkSidecar(t *testing.T, all objects) {
	t.Helper()
	pod := all["Deployment"].(*appsv1.Deployment).Spec.Template.Spec
	sidecar := pod.InitContainers[0]
	if sidecar.RestartPolicy == nil || *sidecar.RestartPolicy != corev1.ContainerRestartPolicyAlways {
		t.Error("the relay is no sidecar")
	}
	if security := sidecar.SecurityContext; !*security.RunAsNonRoot || *security.AllowPrivilegeEscalation || !*security.ReadOnlyRootFilesystem {
		t.Errorf("the relay may do too much: %+v", security)
	}
	if *pod.TerminationGracePeriodSeconds < 30 {
		t.Errorf("%d s are not enough for a drain of 20 s and the settles after it", *pod.TerminationGracePeriodSeconds)
	}
	checkCommand(t, sidecar)
	metrics := slices.IndexFunc(sidecar.Env, func(e corev1.EnvVar) bool { return e.Name == "OUTBOX_METRICS_LISTEN" && e.Value == ":9464" })
	if metrics < 0 || sidecar.LivenessProbe.HTTPGet.Path != "/healthz" {
		t.Error("the kubelet cannot see the relay's health")
	}
	secrets := all["Secret"].(*corev1.Secret).StringData
	said := configCheck(t, sidecar, func(e corev1.EnvVar) string {
		value := secrets[e.ValueFrom.SecretKeyRef.Key]
		if value == "" {
			t.Errorf("there is no secret %q", e.ValueFrom.SecretKeyRef.Key)
		}
		return strings.NewReplacer("whsec_CHANGE-ME", secret, "CHANGE-ME-CHANGE-ME", "charttest-charttest-charttest").Replace(value)
	})
	if strings.Contains(said, "warning") {
		t.Errorf("config check warns: %s", said)
	}
	job := all["Job"].(*batchv1.Job).Spec.Template.Spec
	for _, c := range slices.Concat(job.InitContainers, job.Containers) {
		if key := c.Env[0].ValueFrom.SecretKeyRef.Key; secrets[key] == "" {
			t.Errorf("%s: there is no secret %q", c.Name, key)
		}
	}
}
